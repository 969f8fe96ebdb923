"""HTML from Markdown, as the report of an ablation has it."""

from experiments.markdown import markdown


def test_markdown():
    assert markdown("## Title\n\n**1.25** and *not*") == "<h2>Title</h2>\n<p><strong>1.25</strong> and *not*</p>"
    assert markdown("`--out <x>`") == "<p><code>--out &lt;x&gt;</code></p>"
