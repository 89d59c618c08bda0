"""`kvbench analyze attention`: maps of attention by layer, and its variance over tokens."""
