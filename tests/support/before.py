"""A node of the version before listings, as far as the network shows it."""

from types import SimpleNamespace

from swarmnode.wire import ids


class Before:
    """`network` without the protocols of listings and pulls, which it neither serves nor speaks."""

    def __init__(self, network):
        self._network = network
        self.requests = SimpleNamespace(serve=self._serve, request=network.requests.request)

    def __getattr__(self, name):
        return getattr(self._network, name)

    def _serve(self, protocol, *args, **kwargs):
        if protocol not in (ids.LISTING_PROTOCOL, ids.GROUPS_PROTOCOL):
            self._network.requests.serve(protocol, *args, **kwargs)
