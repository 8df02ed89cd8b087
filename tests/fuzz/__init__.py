"""Long searches for inputs that break something; the tests run a short form of each."""
