"""deepinfer-structured inside vLLM: what vLLM's own gate gets wrong is right there, or refused with the reason."""

import json
from pathlib import Path

import jsonschema
import pytest
import vllm.sampling_params
import vllm.v1.structured_output as manager_module
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

pytestmark = pytest.mark.vllm

CASES = Path(__file__).resolve().parents[2] / "packages/deepinfer-structured/tests/data/schema-cases-dev.jsonl"
EOS = 2


@pytest.fixture(scope="module")
def llm(byte_model):
    """One engine with the adapter switched on; vLLM is put back as it was afterwards."""
    from deepinfer_structured.adapters.vllm import plugin
    from vllm import LLM

    patch = pytest.MonkeyPatch()
    params = vllm.sampling_params.SamplingParams
    patch.setattr(manager_module, "GuidanceBackend", manager_module.GuidanceBackend)
    patch.setattr(params, "_validate_structured_outputs", params._validate_structured_outputs)
    patch.setenv(plugin.SWITCH, "1")
    plugin.register()
    plugin.register()  # vLLM may call it more than once in a process
    engine = LLM(
        str(byte_model), dtype="float32", max_model_len=512, max_num_seqs=16,
        kv_cache_memory_bytes=1 << 22,
    )  # fmt: skip
    yield engine
    engine.llm_engine.engine_core.shutdown()
    patch.undo()


def generate(llm, schemas, **options):
    params = [
        SamplingParams(
            temperature=1, seed=i, max_tokens=300, structured_outputs=StructuredOutputsParams(json=s), **options
        )
        for i, s in enumerate(schemas)
    ]
    return llm.generate([{"prompt_token_ids": [1, 40, 50]}] * len(params), params, use_tqdm=False)


def test_answers_that_end_fit_their_schemas(llm):
    small = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}
    pattern = {
        "type": "object",
        "properties": {"k": {"type": "string", "pattern": "^a+$", "maxLength": 4}},
        "required": ["k"],
    }
    base = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    schemas = [
        small | {"additionalProperties": False},
        pattern | {"additionalProperties": False},
        {"allOf": [base, {"additionalProperties": False, "properties": {"x": True}}]},
        {"enum": ["red", "green", 7]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    ] * 4
    ended = 0
    for schema, output in zip(schemas, generate(llm, schemas), strict=True):
        if output.outputs[0].finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert ended >= 12


def test_a_schema_that_nothing_fits_fails_alone_and_says_where(llm):
    impossible = {"type": "integer", "minimum": 5, "maximum": 1}
    with pytest.raises(Exception, match=r"(?i)minimum|maximum|no .*value"):
        generate(llm, [impossible])
    assert generate(llm, [{"enum": ["still here"]}])[0].outputs[0].text == '"still here"'


@pytest.mark.parametrize("case", [json.loads(line) for line in CASES.read_text().splitlines()], ids=lambda c: c["name"])
def test_every_known_case_is_right_or_refused_with_a_reason(llm, case):
    backend = manager_backend(llm)
    refusal, grammar = None, None
    try:
        grammar = backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(case["schema"]), {EOS})
    except ValueError as error:
        refusal = str(error)
    if grammar is None:
        assert len(refusal) > 20
        return
    tokenizer = llm.get_tokenizer()
    for check in case["checks"]:
        ids = tokenizer.encode(check["instance"], add_special_tokens=False)
        accepted = grammar.accept_tokens("r", [*ids, EOS])
        # A valid text may be refused where a grammar asks for one spelling (5e-1 for 0.5), as a library does.
        must = check["valid_per_jsonschema"] is check["xgrammar_0.2.9"] is check["llguidance_1.9.1"] is True
        assert accepted or not must, (case["schema"], check["instance"])
        assert not accepted or check["valid_per_jsonschema"] is not False, (case["schema"], check["instance"])
        grammar.reset()


def manager_backend(llm):
    manager = llm.llm_engine.engine_core.engine_core.structured_output_manager
    if manager.backend is None:
        generate(llm, [{"enum": [1]}])
    assert type(manager.backend).__module__.startswith("deepinfer_structured")
    return manager.backend


def test_draft_tokens_are_cut_at_the_first_forbidden_one(llm):
    grammar = manager_backend(llm).compile_grammar(StructuredOutputOptions.REGEX, "ab+c", {EOS})
    ids = llm.get_tokenizer().encode("abbxc", add_special_tokens=False)
    assert grammar.validate_tokens(ids) == ids[:3]
    assert grammar.accept_tokens("r", ids[:3])
    grammar.rollback(2)
    assert grammar.validate_tokens(ids[2:3]) == ids[2:3]
    assert not grammar.is_terminated()
    assert grammar.accept_tokens("r", [*ids[1:3], ids[4]])
    assert not grammar.is_terminated()  # the end-of-sequence token must still be forced
    assert grammar.accept_tokens("r", [EOS])
    assert grammar.is_terminated()
