"""The tokenizer of a run, as transformers reads it."""

import json

import pytest

from halfstep.config.load import load
from halfstep.core.errors import HalfstepError
from halfstep.core.formats import FP32
from halfstep.tools.export.targets import TARGETS, Job, check_tokenizer, write_tokenizer
from halfstep.training.data.tokenizer_base import BytesTokenizer
from halfstep.training.data.tokenizers import HuggingFace, SentencePiece, Tiktoken
from tests.refusals import refuses
from tests.training.data.test_tokenizers import bpe, sentencepiece_model, tiktoken_content  # noqa: F401

MODEL = load("gpt2", ["model.context=16"]).model
TEXTS = ["", "the then thin", "naïve café 中文\n\n\t  x  ", "a\x00b", "don't 1234 stop"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "tiktoken"])
def test_transformers_encodes_as_the_run_did(tmp_path, kind, text):
    from transformers import AutoTokenizer

    tokenizer = BytesTokenizer() if kind == "bytes" else Tiktoken("tiktoken:mini", tiktoken_content(), 259)
    write_tokenizer(tmp_path, tokenizer, MODEL)
    check_tokenizer(tmp_path, tokenizer, text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.separator
    assert theirs.decode(theirs(text)["input_ids"]) == text


def test_a_tokenizer_that_reads_otherwise_is_refused(tmp_path):
    tokenizer = Tiktoken("tiktoken:mini", tiktoken_content(), 259)
    write_tokenizer(tmp_path, tokenizer, MODEL)
    with refuses(HalfstepError, "encodes held-out text otherwise in transformers, from token 0", "safetensors"):
        check_tokenizer(tmp_path, BytesTokenizer(), "the")


def test_a_tokenizer_json_is_kept_as_it_is(tmp_path, bpe):  # noqa: F811
    tokenizer = HuggingFace("t", bpe, 0)
    write_tokenizer(tmp_path, tokenizer, MODEL)
    assert (tmp_path / "tokenizer.json").read_bytes() == bpe
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    for text in TEXTS:
        check_tokenizer(tmp_path, tokenizer, text)


def test_sentencepiece_is_refused(tmp_path, sentencepiece_model):  # noqa: F811
    with refuses(HalfstepError, "of kind sentencepiece", "--to safetensors"):
        write_tokenizer(tmp_path, SentencePiece("s", sentencepiece_model, None), MODEL)


@pytest.mark.parametrize("to", ["safetensors", "onnx"])
def test_the_tokenizer_of_packed_data_lies_next_to_the_weights(tmp_path, monkeypatch, bpe, to):  # noqa: F811
    monkeypatch.setattr("halfstep.torch.export.write_onnx", lambda config, weights, file: file.touch())
    job = Job(MODEL, {}, FP32, None, "cpu", HuggingFace("t", bpe, 0), "")
    TARGETS[to].write(job, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == bpe
