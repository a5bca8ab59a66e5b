"""Other libraries, each imported only when it is used."""
