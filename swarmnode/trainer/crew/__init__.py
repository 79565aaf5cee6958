"""The trainer process of a node that holds one stage of a policy. A whole policy's trainer is one
folder up."""
