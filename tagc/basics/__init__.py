"""Small helpers that know nothing of compression."""
