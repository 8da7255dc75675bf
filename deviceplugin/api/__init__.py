"""Generated messages of gRPC; see README.md here."""
