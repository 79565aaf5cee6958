"""The Unix socket between network process and trainer: messages, framing, and both ends. Imports no
torch.

The network process serves (`server.py`), the trainer connects (`client.py`). Either may restart
alone.
"""
