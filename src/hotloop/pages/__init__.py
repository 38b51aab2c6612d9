"""Self-contained pages: one HTML file, pictures and charts inside, nothing loaded from elsewhere."""
