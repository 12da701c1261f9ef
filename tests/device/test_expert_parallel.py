"""Experts over groups of ranks: the tokens of one rank, wherever experts lie and move to."""

import pytest
from oracles import make
from rank_threads import Ranks, alone

PROMPTS = ([3, 1, 4, 1, 5], [(7 * i) % 199 for i in range(20)], [9, 8])
LAYER, EXPERTS = 1, 8
MODELS = {"mixtral": 4, "qwen2-moe": 6, "deepseek": 8, "dots1": 8}
SPLITS = [(1, 2), (2, 1), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random models with experts, and the tokens that one rank makes of them."""
    made = {}

    def folder(name):
        if name not in made:
            path = make(name, tmp_path_factory.mktemp(name), num_key_value_heads=4).folder
            made[name] = path, alone(path, PROMPTS)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def dots(folders):
    """A model of one dense layer and two of eight experts each, with shared ones."""
    return folders("dots1")


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(folders, name, tp, ep):
    """Prefilled eagerly and decoded from captured graphs, alone and together."""
    path, expected = folders(name)
    redundant = -MODELS[name] % ep  # what makes it spread evenly
    with Ranks(path, tp, ep, redundant_experts=redundant) as ranks:
        assert ranks.tokens(PROMPTS) == expected
        assert ranks.tokens(PROMPTS) == expected
