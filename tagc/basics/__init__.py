"""Small helpers that do not depend on compression."""
