"""Exceptions, by cause.

    SwarmNodeError
    ├── ConfigError            the operator's configuration (exit 78)
    ├── LocalError             this machine
    │   ├── Unavailable        a port, directory or package is missing (exit 69)
    │   ├── Refused            continuing would be unsafe (exit 77)
    │   ├── DeviceError        the accelerator failed or is too small (exit 75)
    │   │   └── RankLost       a rank on another device of this machine ended
    │   └── StateError         files in the data directory are unusable (exit 69)
    └── PeerError              a peer or the network; never ends the process
        ├── BadMessage         bytes that are not a valid message
        ├── PeerTimeout        no response within the deadline
        └── Incompatible       an honest peer of another swarm, version or policy

The handler of a request catches and counts its `PeerError`. The others reach `main`, which prints
one line and exits with `exit_code`.
"""


class SwarmNodeError(Exception):
    """Base of all errors that this program raises. `exit_code` is the exit code of a process that
    does not catch it."""

    exit_code = 70


class ConfigError(SwarmNodeError):
    """Raised if a configuration value, key or file is invalid."""

    exit_code = 78


class LocalError(SwarmNodeError):
    """Raised if this machine, not a peer, is the cause."""


class Unavailable(LocalError):
    """Raised if a port, directory, file or package that the node needs is not available."""

    exit_code = 69


class Refused(LocalError):
    """Raised if continuing would be unsafe: other users can read the key, or the node cannot follow
    the swarm's manifest."""

    exit_code = 77


class DeviceError(LocalError):
    """Raised if the device is lost or too small. A restart may help."""

    exit_code = 75


class StateError(LocalError):
    """Raised if the files of an earlier run cannot be used."""

    exit_code = 69


class EngineGone(Exception):
    """Raised by an engine that this node no longer trains, for example because another node has
    become the head of the crew. Not an error."""


class RestartWanted(Exception):
    """Raised by a process that must start again, for example with another manifest. Not an error:
    the supervisor restarts the process at once."""


class RankLost(EngineGone, DeviceError):
    """Raised if the process of another device of this machine has ended or hangs. The trainer saves
    its state and restarts."""


class PeerError(SwarmNodeError):
    """Raised if a peer, or the network to it, is the cause."""


class BadMessage(PeerError):
    """Raised by a decoder. `reason` comes from a closed set, so that it can be a metric label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PeerTimeout(PeerError):
    """Raised if a peer has not responded before the deadline."""


class Incompatible(PeerError):
    """Raised if a peer belongs to another swarm, wire version or policy."""


BY_EXIT_CODE: dict[int, type[SwarmNodeError]] = {
    kind.exit_code: kind for kind in (ConfigError, Refused, DeviceError, Unavailable)
}
"""Exit code of a child process → the error that this process raises."""
