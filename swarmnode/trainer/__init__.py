"""The trainer process and its link to the network process. Importing this package loads no torch; loop.py does."""
