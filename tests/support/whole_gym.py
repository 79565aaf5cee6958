"""Import statement for all of reasoning-gym."""

IMPORT = """
import sys, types
# One generator that no test uses needs pycosat, which exists as source only.
sys.modules.setdefault("pycosat", types.ModuleType("pycosat"))
import reasoning_gym
"""
