"""What an operator may set: the schema, how a YAML file becomes it, and the page that documents it."""
