"""Rules of ops that compute."""
