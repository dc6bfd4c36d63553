from wording import title_case


def test_each_word_begins_with_a_capital():
    assert title_case("a tale of  two cities") == "A Tale Of Two Cities"
