"""Whether the shapes that papers published are seen here too."""
