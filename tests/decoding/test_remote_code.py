"""A saved directory is all that another machine needs: no package, no cache, no network, another place."""

import json
import sys
from pathlib import Path

from checks import run_elsewhere
from domino_spec import modeling_domino
from tiny import make_drafter, make_target, prompt_ids

REPOSITORY = Path(modeling_domino.__file__).parent
CODE_FILES = (
    "configuration_domino.py",
    "speculation_domino.py",
    "processors_domino.py",
    "length_domino.py",
    "target_domino.py",
    "draftcache_domino.py",
    "kernels_domino.py",
    "head_domino.py",
    "generation_domino.py",
    "modeling_domino.py",
    "custom_generate/generate.py",
)

FIRST = """
drafter = AutoModel.from_pretrained(arguments["drafter"], trust_remote_code=True)
result = {"class": type(drafter).__name__, "module": type(drafter).__module__, "plain": plain}
result["config"] = type(AutoConfig.from_pretrained(arguments["drafter"], trust_remote_code=True)).__name__
result["knobs"] = [drafter.generation_config.rollout, type(drafter.generation_config).__name__]
result["assisted"] = text(drafter)
hook = {"custom_generate": arguments["drafter"], "trust_remote_code": True}
result["custom"] = text(drafter, **hook)
result["without"] = sentence(lambda: target.generate(ids, max_new_tokens=4, **hook))
result["llama"] = sentence(lambda: target.generate(ids, max_new_tokens=4, assistant_model=target, **hook))
drafter.save_pretrained(arguments["again"])
print("RESULT" + json.dumps(result))
"""

SECOND = """
first = AutoModel.from_pretrained(arguments["drafter"], trust_remote_code=True)
seams = lambda: (GenerationMixin._assisted_decoding, GenerationMixin._validate_generation_mode)
before = seams()
second = AutoModel.from_pretrained(arguments["again"], trust_remote_code=True)
result = {"plain": plain, "copies": len({type(first), type(second)})}
result["one dispatch"] = seams() == before
result["first"], result["second"], result["first again"] = text(first), text(second), text(first)
result["custom"] = text(second, custom_generate=arguments["again"], trust_remote_code=True)
both = [dict(model.named_parameters()) for model in (first, second)]
result["weights"] = all(torch.equal(x, both[1][name]) for name, x in both[0].items())
result["knobs"] = second.generation_config.rollout
print("RESULT" + json.dumps(result))
"""


def test_saved_directory_works_anywhere(tmp_path):
    """Save, move, load in an empty world, generate both ways; save from there, move, load both copies at once."""
    target = make_target()
    drafter = make_drafter(target)
    drafter.generation_config.rollout = "parallel"
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "made")
    for name in CODE_FILES:
        assert (tmp_path / "made" / name).read_text() == (REPOSITORY / name).read_text(), name
    (tmp_path / "made").rename(tmp_path / "moved")
    (tmp_path / "first").mkdir()
    result = run_elsewhere(
        FIRST,
        tmp_path / "first",
        target=tmp_path / "target",
        drafter=tmp_path / "moved",
        again=tmp_path / "again",
    )
    assert result["class"] == "DominoForSpeculation" and result["module"].startswith("transformers_modules.")
    assert result["config"] == "DominoConfig"
    assert result["knobs"] == ["parallel", "DominoGenerationConfig"]
    assert result["assisted"][0] == result["custom"][0] == result["plain"]
    assert result["assisted"][1] == result["custom"][1] and sum(result["custom"][1][0]) == 13
    for key in ("without", "llama"):
        assert result[key].startswith("ValueError: custom_generate needs the drafter"), result[key]

    for name in CODE_FILES:
        assert (tmp_path / "again" / name).read_text() == (REPOSITORY / name).read_text(), name
    (tmp_path / "again").rename(tmp_path / "elsewhere")
    (tmp_path / "second").mkdir()
    result = run_elsewhere(
        SECOND,
        tmp_path / "second",
        target=tmp_path / "target",
        drafter=tmp_path / "moved",
        again=tmp_path / "elsewhere",
    )
    assert result["copies"] == 2 and result["one dispatch"]
    for key in ("first", "second", "first again", "custom"):
        assert result[key][0] == result["plain"], key
    assert result["weights"] and result["knobs"] == "parallel"


def test_saved_config_names_the_code(tmp_path):
    make_drafter(make_target()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoForSpeculation",
    }
    assert config["model_type"] == "domino"
    assert config["architectures"][0] == "DFlashDraftModel"
    assert str(tmp_path) not in (tmp_path / "config.json").read_text()


def test_hook_text_equals_the_file():
    assert (REPOSITORY / "custom_generate" / "generate.py").read_text() == modeling_domino.CUSTOM_GENERATE


def test_repository_itself_is_a_complete_remote_code_closure():
    """Only relative imports of single siblings are followed, and only the library's requirements may be needed."""
    allowed = {"transformers", "torch", *sys.stdlib_module_names}
    for name in CODE_FILES:
        for line in (REPOSITORY / name).read_text().splitlines():
            words = line.split()
            if not words or words[0] not in ("from", "import") or line.startswith(" "):
                continue
            module = words[1]
            if module.startswith("."):
                assert module.strip(".") + ".py" in CODE_FILES and not module.startswith(".."), line
                assert not name.startswith("custom_generate"), line
            else:
                assert module.split(".")[0] in allowed, line


def test_generate_for_equals_generate():
    target = make_target()
    drafter = make_drafter(target)
    kwargs = {"max_new_tokens": 9, "do_sample": False}
    plain = target.generate(prompt_ids(), **kwargs)
    assert drafter.generate_for(target, prompt_ids(), **kwargs).tolist() == plain.tolist()
    assert drafter.last_speculation.num_rounds > 0
