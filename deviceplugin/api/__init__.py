"""Generated messages of gRPC; see README.md here. Input: bytes. Output: messages, and the reverse."""
