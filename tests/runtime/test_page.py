"""HTML from Markdown, tables and figures."""

import base64
import re

import pytest
from matplotlib.figure import Figure

from runtime.report import figure, markdown, page, preformatted, table


@pytest.mark.parametrize(
    "text, html",
    [
        ("# Title", "<h1>Title</h1>"),
        ("### a `b`", "<h3>a <code>b</code></h3>"),
        ("one\n\ntwo\nlines", "<p>one</p>\n<p>two\nlines</p>"),
        ("**1.25** and *not run*", "<p><strong>1.25</strong> and <em>not run</em></p>"),
        ("[paper](https://arxiv.org/abs/1910.07467)", '<p><a href="https://arxiv.org/abs/1910.07467">paper</a></p>'),
        ("a < b & c", "<p>a &lt; b &amp; c</p>"),
        ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
        ("2 * 3 * 4", "<p>2 * 3 * 4</p>"),
        ("`python ablate.py --out **x**`", "<p><code>python ablate.py --out **x**</code></p>"),
    ],
)
def test_markdown(text, html):
    assert markdown(text) == html


def test_markdown_tables_keep_every_cell():
    html = markdown("| arm | loss |\n|---|---|\n| rmsnorm | **1.5** |\n| x |  |\n")
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    assert rows == [["arm", "loss"], ["rmsnorm", "<strong>1.5</strong>"], ["x", ""]]


def test_a_table_of_plain_text():
    html = table(["*a*", "b"], [["", "<1>"]])
    assert re.findall(r"<t[hd]>(.*?)</t[hd]>", html) == ["*a*", "b", "", "&lt;1&gt;"]


def test_text_is_not_html():
    assert preformatted("if a < b:\n    '&amp;'") == "<pre>if a &lt; b:\n    &#x27;&amp;amp;&#x27;</pre>"
    assert "<title>a &lt; b</title>" in page("a < b", []) and "<h1>a &lt; b</h1>" in page("a < b", [])


def test_a_figure_is_svg_inside_the_page_and_the_same_each_time():
    def html() -> str:
        plot = Figure(figsize=(4, 3))
        plot.subplots().plot([1, 2, 3], [3, 1, 2])
        return figure(plot, alt='a "line"')

    first = html()
    assert first == html()
    assert 'alt="a &quot;line&quot;"' in first
    (data,) = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", first)
    svg = base64.b64decode(data).decode()
    assert svg.count("<path") > 3 and "</svg>" in svg
