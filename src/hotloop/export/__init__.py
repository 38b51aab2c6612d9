"""A trained model as a file that serves: made and checked with torch; verified and run without."""
