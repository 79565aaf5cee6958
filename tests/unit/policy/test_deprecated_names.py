"""New names of transformers are used if they exist, so that no deprecation warning appears."""

from swarmnode.policy.model import cache_keyword


def test_cache_argument_has_the_model_s_name():
    def later(input_ids, cache=None, use_cache=None): ...
    def earlier(input_ids, past_key_values=None, use_cache=None): ...

    assert (cache_keyword(later), cache_keyword(earlier)) == ("cache", "past_key_values")
