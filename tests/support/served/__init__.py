"""A fake inference server, and the policy and installation for a real one."""
