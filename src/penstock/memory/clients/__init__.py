"""Memory that the requests of clients take in the server itself."""
