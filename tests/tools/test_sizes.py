"""The size report measures what it says."""

import textwrap

from tools.sizes import File, Function, main, measure, report

KERNEL = "src/flash3/backends/hopper/forward.py"
SOURCE = '''
import cutlass.cute as cute

class Consumer:
    @cute.jit
    def next_block(self, block, *, masked, **rest):
        if masked:
            for row in block:
                with row:
                    pass
        elif block:
            while block:
                pass

def host(q, k, v):
    """Two nested functions count apart."""
    def inner():
        for x in q:
            pass
    return inner

@cute.kernel(preprocess=True)
def kernel(operands): pass
'''


def test_each_function_is_measured():
    file, functions = measure(SOURCE, KERNEL)
    assert file == File(KERNEL, "kernel", len(SOURCE.splitlines()))
    assert functions == [
        Function(KERNEL, 6, "Consumer.next_block", "device", lines=8, parameters=3, nesting=3),
        Function(KERNEL, 15, "host", "host", lines=6, parameters=3, nesting=0),
        Function(KERNEL, 17, "host.inner", "host", lines=3, parameters=0, nesting=1),
        Function(KERNEL, 23, "kernel", "device", lines=1, parameters=1, nesting=0),
    ]


def test_a_file_that_imports_no_kernel_language_is_held_to_the_smaller_guide():
    assert measure("import torch", KERNEL)[0].kind == "host"
    assert measure("import cutlass", "src/flash3/bench/peers.py")[0].kind == "host"
    assert not File(KERNEL, "kernel", 600).over
    assert File(KERNEL, "host", 600).over


def test_else_is_deeper_than_elif():
    elif_chain = "def f():\n  if a: pass\n  elif b: pass\n  elif c: pass\n"
    nested_else = "def f():\n  if a: pass\n  else:\n    x = 1\n    if b: pass\n"
    assert measure(elif_chain, "a.py")[1][0].nesting == 1
    assert measure(nested_else, "a.py")[1][0].nesting == 2


def test_everything_over_a_guide_is_listed_and_marked():
    functions = [Function("a.py", n, f"long{n}", "host", lines=100 - n, parameters=1, nesting=1) for n in range(10)]
    functions += [Function("a.py", 90, "wide", "host", lines=2, parameters=8, nesting=1)]
    functions += [Function("a.py", 95, "small", "host", lines=1, parameters=1, nesting=1)]
    text = report([File("a.py", "host", 100)], functions)
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("!")] == [*(f"long{n}" for n in range(10)), "wide"]
    assert "small" not in text
    assert text.endswith("1 files, 100 lines, 12 functions; 11 over a guide")


def test_the_command_reads_a_folder(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text(textwrap.dedent("def f(a):\n    return a\n"))
    main([str(tmp_path)])
    assert "1 files, 2 lines, 1 functions; 0 over a guide" in capsys.readouterr().out
