"""The part of a crew in the trainer process: this node's stage, and the crew's head."""
