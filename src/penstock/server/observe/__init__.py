"""What is kept for those who watch the server; everything in it is bounded."""
