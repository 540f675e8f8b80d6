"""Markup by construction: whatever text goes in, a parser finds the elements that were asked for, and the text unchanged."""

from html.parser import HTMLParser
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from phalanx.schedule.markup import NOTHING, Markup, join, tag
from phalanx.schedule.printable import printable

ANYTHING = st.text() | st.sampled_from(["<b>", "</p>", '"', "'", "&amp;", "<!--", "]]>", "<script>", "\x00", "\ud800", "\x1b[2J"])


class Found(HTMLParser):
    """What a lenient parser makes of a text."""

    def __init__(self, text):
        super().__init__()
        self.seen = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.seen.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@given(ANYTHING, ANYTHING)
def test_text_stays_text_and_attributes_stay_attributes(child, value):
    made = tag("p", "a", child, tag("i", child, title=value), data_x=value, class_=None)
    found = Found(made)
    assert found.seen == [("p", {"data-x": printable(value)}), ("i", {"title": printable(value)})]
    assert found.text == f"a{printable(child)}{printable(child)}"
    assert ElementTree.fromstring(made).find("i") is not None, "and it is XML"


def test_only_markup_is_trusted():
    bold = tag("b", "x")
    assert tag("p", bold) == "<p><b>x</b></p>"
    assert tag("p", f"{bold}") == "<p>&lt;b&gt;x&lt;/b&gt;</p>", "formatting makes plain text of it"
    assert tag("p", bold + "y") == "<p>&lt;b&gt;x&lt;/b&gt;y</p>"
    assert join([bold, "<"], "\n") == "<b>x</b>\n&lt;"
    assert isinstance(join([]), Markup)
    assert tag("line", x1=0) == '<line x1="0"/>'
    assert tag("i") == "<i></i>"
    assert NOTHING == ""
