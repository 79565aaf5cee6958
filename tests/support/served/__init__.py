"""An inference server that is none, and what a real one needs: its policy and its installation."""
