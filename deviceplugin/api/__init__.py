"""Generated gRPC messages and stubs; see README.md here."""
