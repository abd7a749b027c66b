"""Programs as files that run with torch alone."""
