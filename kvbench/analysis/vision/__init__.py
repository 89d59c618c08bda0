"""Retention of images: visual tokens kept, and cache use by images and text."""
