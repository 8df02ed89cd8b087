"""Long searches for inputs that break the server; the tests run a short form of each."""
