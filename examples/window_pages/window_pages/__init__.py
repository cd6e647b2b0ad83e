"""Paged attention that reads only the pages a sliding window touches."""
