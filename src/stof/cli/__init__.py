"""The `stof` command line. Modules here import heavy packages inside functions, so that help texts appear at once."""
