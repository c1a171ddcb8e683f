"""Request fields through the real GenerateReqInput: single, batch, n > 1, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang.srt.layers.moe.routed_experts.request import asks_for_rows, check_request

ON = SimpleNamespace(enable_return_routed_experts=True)
OFF = SimpleNamespace(enable_return_routed_experts=False)


def normalized(**fields):
    obj = GenerateReqInput(**fields)
    obj.normalize_batch_and_arguments()
    return obj


def wants(obj):
    return (obj.return_routed_experts, obj.routed_experts_start_len, obj.routed_experts_dtype)


def test_a_single_request_has_the_defaults_of_the_base():
    assert wants(normalized(text="a")) == (False, 0, "int32")


def test_every_request_of_a_batch_has_its_own_settings():
    obj = normalized(
        text=["a", "b", "c"],
        return_routed_experts=[True, False, True],
        routed_experts_start_len=[3, 0, 5],
        routed_experts_dtype=["auto", "int32", "int32"],
    )
    assert [wants(obj[i]) for i in range(3)] == [
        (True, 3, "auto"),
        (False, 0, "int32"),
        (True, 5, "int32"),
    ]


def test_one_setting_counts_for_the_whole_batch():
    obj = normalized(input_ids=[[1], [2]], return_routed_experts=True, routed_experts_start_len=4)
    assert [wants(obj[i]) for i in range(2)] == [(True, 4, "int32")] * 2


@pytest.mark.parametrize(
    "embeds, is_single",
    [
        ([[0.5, 0.25], [0.125, 1.0]], True),
        (np.array([[0.5, 0.25], [0.125, 1.0]]), True),
        ([[[0.5, 0.25]], [[0.125, 1.0]]], False),
    ],
    ids=["list", "array", "batch"],
)
def test_embeddings_as_the_base_takes_them(embeds, is_single):
    obj = normalized(input_embeds=embeds)
    assert obj.is_single == is_single and not asks_for_rows(obj)


def test_samples_of_a_prompt_share_its_settings():
    obj = normalized(
        text=["a", "b"],
        sampling_params={"n": 3},
        return_routed_experts=[True, False],
        routed_experts_start_len=[1, 2],
    )
    assert [obj[i].text for i in range(6)] == ["a", "b"] * 3
    assert [wants(obj[i])[:2] for i in range(6)] == [(True, 1), (False, 2)] * 3
    single = normalized(text="a", sampling_params={"n": 2}, return_routed_experts=True)
    assert all(single[i].return_routed_experts for i in range(2))


def test_numpy_integers_are_integers():
    assert normalized(text="a", routed_experts_start_len=np.int64(7)).routed_experts_start_len == 7


@pytest.mark.parametrize("value", [-1, True, False, 1.0, 1.5, "3", None, [1], {}])
def test_start_len_must_be_a_position(value):
    with pytest.raises(ValueError, match="routed_experts_start_len"):
        normalized(text="a", routed_experts_start_len=value)


@pytest.mark.parametrize("value", ["int8", "INT32", "", None, 32, ["auto"]])
def test_dtype_must_be_known(value):
    with pytest.raises(ValueError, match="routed_experts_dtype"):
        normalized(text="a", routed_experts_dtype=value)


@pytest.mark.parametrize("value", ["yes", 1, None, [True]])
def test_asking_is_a_bool(value):
    with pytest.raises(ValueError, match="return_routed_experts"):
        normalized(text="a", return_routed_experts=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_routed_experts", [True]),
        ("routed_experts_start_len", [0, 0, 0]),
        ("routed_experts_start_len", [0, -1]),
        ("routed_experts_dtype", ["auto", "other"]),
    ],
)
def test_lists_fit_the_batch(name, value):
    for prompts in ({"text": ["a", "b"]}, {"input_ids": [[1], [2]]}):
        with pytest.raises(ValueError, match=name):
            normalized(**prompts, **{name: value})


def test_rows_of_a_server_without_the_flag_are_refused_by_name():
    for asked in (True, [False, True]):
        obj = GenerateReqInput(text=["a", "b"], return_routed_experts=asked)
        check_request(obj, ON)
        with pytest.raises(ValueError, match="--enable-return-routed-experts"):
            check_request(obj, OFF)
    check_request(GenerateReqInput(text="a"), OFF)


def test_only_those_who_asked_ask():
    assert not asks_for_rows(GenerateReqInput(text="a"))
    assert not asks_for_rows(SimpleNamespace())
    assert asks_for_rows(GenerateReqInput(text=["a", "b"], return_routed_experts=[False, True]))
