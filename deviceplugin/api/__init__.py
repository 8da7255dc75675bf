"""Generated messages of gRPC; see README.md here. Comes in: bytes. Goes out: messages, and the reverse."""
