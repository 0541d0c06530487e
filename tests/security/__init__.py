"""What others must not see, and must not be able to do."""
