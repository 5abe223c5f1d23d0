import subprocess
import sys

from deepinfer_offline.engine.vllm.startup import captured_output, root_cause, tidy

LOG = """\
(EngineCore pid=12) ERROR 11-29 17:51:35 [core.py:1200] EngineCore failed to start.
(EngineCore pid=12) ERROR 11-29 17:51:35 [core.py:1200] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-29 17:51:35 [core.py:1200]   File "core.py", line 9, in x
(EngineCore pid=12) ERROR 11-29 17:51:35 [core.py:1200] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_the_last_exception_that_says_something():
    assert root_cause(LOG) == "ValueError: No available memory for the cache blocks."


def test_a_qualified_name_is_shortened():
    assert root_cause("pkg.sub.ConfigError: bad value 3") == "ConfigError: bad value 3"


def test_a_log_without_an_exception_has_no_cause():
    assert root_cause("INFO: all is well\nstarting\n") is None


def test_output_of_child_processes_is_captured(capfd):
    with captured_output(show=False) as log:
        subprocess.run(
            [sys.executable, "-c", "import sys; print('ValueError: from a child', file=sys.stderr)"], check=True
        )
    assert root_cause(log.text) == "ValueError: from a child"
    assert capfd.readouterr().err == ""


def test_captured_output_can_be_shown(capfd):
    with captured_output(show=True) as log:
        subprocess.run([sys.executable, "-c", "print('hello')"], check=True)
    assert "hello" in log.text
    assert "hello" in capfd.readouterr().err


def test_frames_around_a_reason_are_stripped():
    pydantic = "ValidationError: 1 validation error for ModelConfig\n  Value error, too long. [type=value_error, input_value=x]"
    assert tidy(pydantic) == "too long."
    field = (
        "ValidationError: 1 validation error for CacheConfig\ncache_dtype\n  Value error, no 'fp3'. [type=value_error]"
    )
    assert tidy(field) == "cache_dtype: no 'fp3'."
    worker = "RuntimeError: Worker failed with error 'no room.', please check the stack trace above for the root cause"
    assert tidy(worker) == "no room."
    assert tidy("OSError: plain") == "OSError: plain"


def test_advice_is_given_in_flags_of_this_command_line():
    memory = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when ..."
    assert tidy(memory) == "there is no memory for the KV cache: give more with --kv-memory"
    model = (
        "Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: dict_keys([...])"
    )
    assert tidy(model) == "this vLLM has no model FooForCausalLM; --engine native may have it"
    context = (
        "User-specified max_model_len (99999) is greater than the derived max_model_len (max_position=2048.0 or ..."
    )
    assert tidy(context) == "--max-model-len 99999 is more than the model's context of 2048 tokens"
    heads = "Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    assert tidy(heads) == "9 attention heads cannot be spread over 2 workers: --tensor-parallel must divide 9"


def test_a_long_cause_ends_with_a_sentence():
    long = "ValueError: the model type `foo` is not known. " + "This could be because of this or that. " * 20
    assert tidy(long).startswith("ValueError: the model type `foo` is not known. ")
    assert tidy(long).endswith("this or that.")
    assert len(tidy(long)) <= 300
    assert tidy("x" * 400) == "x" * 300 + "..."
