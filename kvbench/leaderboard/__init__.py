"""Published runs, which their digests identify, and the leaderboard that is built from them."""
