"""One run against another: has a score dropped, and how many samples would show that it has?"""
