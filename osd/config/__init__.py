"""What an operator may set: the schema, its reader, and the page that documents it."""
