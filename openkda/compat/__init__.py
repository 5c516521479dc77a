"""Drop-in signatures of other libraries, and registration with them. Each module imports its library when asked."""
