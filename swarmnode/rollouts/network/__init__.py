"""Exchange of rollouts in the network process."""
