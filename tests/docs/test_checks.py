"""The checks on documents find what they are for."""

from tests.docs.documents import anchors, code_words, links, python_program, result_files
from tests.docs.names import missing

TEXT = """# A *title*, with `code`
See [one](docs/one.md), [two](two.md#part "hint"), ![three](<three.png>) and [out](https://example.org/x.md).
<img src="four.png"> `not [a](link.md)` `mask.Mask`
```python
x = 1
```
- text
  ```python
  assert x == 1
  ```
```python no-run
raise SystemExit  # `not.code`
```
## Figures & numbers
benchmarks/results/a.json, benchmarks/results/b/*.json.
```sh
cat benchmarks/results/c.csv
```
"""


def test_program_keeps_the_documents_lines():
    lines = python_program(TEXT).splitlines()
    assert [(number, line) for number, line in enumerate(lines, start=1) if line] == [(5, "x = 1"), (9, "assert x == 1")]
    assert python_program("# nothing\n```python gpu\nx\n```\n") == ""


def test_links_words_anchors_and_results():
    assert links(TEXT) == ["docs/one.md", "two.md#part", "three.png", "four.png"]
    assert code_words(TEXT) == ["code", "not [a](link.md)", "mask.Mask"]
    assert anchors(TEXT) == {"a-title-with-code", "figures--numbers"}
    assert result_files(TEXT) == ["benchmarks/results/a.json", "benchmarks/results/b/*.json", "benchmarks/results/c.csv"]


def test_names_that_exist_are_found():
    words = ["mask.Mask", "flash3.mask.Mask", "mask.Mask.dense", "backends.base", "problem.py", "backends/base.py", "pyproject.toml"]
    assert missing([*words, "settings.override()", "torch.library.define", "plain", "a + b", "plan.run"]) == []


def test_names_that_do_not_exist_are_told():
    words = ["mask.Mosk", "mask.Mask.dance", "rooms.nowhere", "flash3.nothing", "nofile.py", "ask.Mask"]
    assert missing(words) == sorted(words)
