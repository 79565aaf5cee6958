"""What can go wrong, and whose fault it is.

    SwarmNodeError
    ├── ConfigError            a person's configuration (exit 78)
    ├── LocalError             this machine
    │   ├── Unavailable        something this node needs is not there: port, directory, device (exit
    69)
    │   ├── Refused            this node must not go on: key permissions, incompatible swarm (exit
    77)
    │   ├── DeviceError        the accelerator failed or is too small (exit 75)
    │   │   └── RankLost       a process on another device of this machine ended
    │   └── StateError         the files in the data directory are unusable (exit 69)
    └── PeerError              a peer, or the world between us; never ends the process
        ├── BadMessage         bytes that are not a valid message
        ├── PeerTimeout        no answer within the deadline
        └── Incompatible       an honest peer of another swarm, version or policy

`PeerError` stops at the handler that caused it and is counted there. The others reach `main`, which
prints one line and exits with `exit_code`.
"""


class SwarmNodeError(Exception):
    """Base of everything raised on purpose. `exit_code` is what the process ends with when it
    reaches `main`."""

    exit_code = 70


class ConfigError(SwarmNodeError):
    """Raised when a configuration value, key or file is wrong."""

    exit_code = 78


class LocalError(SwarmNodeError):
    """Raised when this machine, not a peer, is the cause."""


class Unavailable(LocalError):
    """Raised when a port, directory or file that the node needs cannot be had."""

    exit_code = 69


class Refused(LocalError):
    """Raised when going on would be unsafe: a key others can read, a swarm this node cannot
    honour."""

    exit_code = 77


class DeviceError(LocalError):
    """Raised when the device is lost or too small; a restart may help."""

    exit_code = 75


class StateError(LocalError):
    """Raised when the files of an earlier run cannot be used."""

    exit_code = 69


class EngineGone(Exception):
    """Raised by an engine that this node does not train any more, as when another has become the
    head of its crew. Not an error."""


class RankLost(EngineGone, DeviceError):
    """Raised when a process that computes on another device of this machine has ended or hangs. The
    trainer saves what it has and starts again."""


class PeerError(SwarmNodeError):
    """Raised when a peer, or the network between us, is the cause."""


class BadMessage(PeerError):
    """Raised by a decoder. `reason` is one of a closed set, so that it can be a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerTimeout(PeerError):
    """Raised when a peer did not answer before the deadline."""


class Incompatible(PeerError):
    """Raised when a peer belongs to another swarm, wire version or policy."""
