"""What is asked about the items; `{a}` and `{b}` are words, `{text}` is a sentence or a paragraph."""

from __future__ import annotations

NOUN = (
    "What is {a}?",
    "Explain {a} in simple terms.",
    "Explain {a} to a ten-year-old.",
    "Write a short story about {a}.",
    "Write a story in which {a} and {b} play a part.",
    "Write a poem about {a}.",
    "Tell me three facts about {a}.",
    "What is the difference between {a} and {b}?",
    "Write a paragraph about the history of {a}.",
    "Why is {a} important?",
    "Give me five ideas for a school project about {a}.",
    "List five things that have to do with {a}.",
    "Write an email to a colleague about {a}.",
    "What are the advantages and disadvantages of {a}?",
    "How does {a} relate to {b}?",
    "Describe {a} in one sentence.",
    "Write a dialogue between two friends who talk about {a}.",
    "I want to learn about {a}. Where do I start?",
    "Make a plan for a day that has to do with {a} and {b}.",
    "Write a product review of {a}.",
    "Give an example of {a} and explain it.",
    "Who uses {a}, and what for?",
    "Suggest a title and an opening paragraph for an article about {a}.",
    "What should everybody know about {a}?",
)

VERB = (
    "How do I {a}?",
    "What is the best way to {a}?",
    "Why do people {a}?",
    "Give me step-by-step instructions to {a}.",
    "What does it mean to {a}?",
    'Write three sentences with the word "{a}".',
    "What can go wrong when you {a}?",
    "Write a story about someone who has to {a} something.",
)

GLOSS = (
    "Rewrite this in other words: {text}",
    "What is the word for this: {text}?",
    "Give an example of the following: {text}.",
    'Is this true? "{a}" means: {text}.',
    'Write a definition of "{a}" for a dictionary. Hint: {text}.',
)

PARAGRAPH = (
    "Summarize the following text:\n\n{text}",
    "{text}\n\nExplain this paragraph in simple words.",
    "Rewrite the following paragraph so that it is easier to read:\n\n{text}",
    "What is the main point of this text?\n\n{text}",
    "Turn this into a list of bullet points:\n\n{text}",
    "Ask three questions about this text and answer them:\n\n{text}",
)

PACKAGE = (
    "What is the program {a} good for? It is described as: {text}.",
    "Write an announcement for {a}: {text}.",
    "Explain what this software does: {text}",
    "Who would use a program like this, and why? {text}",
    "How would I use this in practice: {text}?",
)

FUNCTION = (
    "What does the function {a} in Python's module {b} do?",
    "How do I use {b}.{a} in Python? Show an example.",
    "Write a Python function `{a}` that does the following: {text}",
    'Complete this Python function:\n\n```python\n{code}\n    """{text}"""\n```',
    '{code}\n    """{text}"""\n',
    "Write a unit test for a function described as: {text}",
    "Write the body of this function.\n\n{code}\n    '''{text}'''\n",
)

TASK = (
    "Write a Python function that {verb} {thing}.",
    'Complete this Python function:\n\ndef {name}({argument}):\n    """\n    {upper} {thing}.\n    """\n',
    'def {name}({argument}):\n    """ {upper} {thing}.\n    >>> {name}({example})\n    """\n',
    "How can I write code that {verb} {thing}?",
    "Write a JavaScript function that {verb} {thing}.",
    "Write a Python program that {verb} {thing} and explain each line.",
)

TASK_VERBS = ("returns", "counts", "finds", "prints", "sorts", "removes", "checks", "computes", "reverses", "filters")
TASK_THINGS = (
    ("the longest word in a sentence", "sentence: str", "'the quick fox'"),
    ("the even numbers in a list", "numbers: List[int]", "[1, 2, 3, 4]"),
    ("the duplicates in a list", "items: list", "[1, 2, 2, 3]"),
    ("the vowels of a string", "text: str", "'hello world'"),
    ("the prime factors of a number", "n: int", "60"),
    ("the keys of a dictionary by their values", "mapping: dict", "{'a': 2, 'b': 1}"),
    ("the words of a text that start with a capital letter", "text: str", "'Alice met Bob'"),
    ("the elements that two lists have in common", "a: list, b: list", "[1, 2], [2, 3]"),
    ("the digits of a number", "n: int", "1234"),
    ("the rows of a matrix", "matrix: List[List[int]]", "[[1, 2], [3, 4]]"),
    ("the positive numbers below a limit", "numbers: list, limit: int", "[5, -1, 9], 6"),
    ("all substrings of a given length", "text: str, length: int", "'abcd', 2"),
    ("the nodes of a binary tree", "root: Node", "None"),
    ("the dates in a list of strings", "texts: List[str]", "['2020-01-02']"),
    ("the maximum of each column", "table: List[List[float]]", "[[1.0, 2.0]]"),
    ("the brackets in an expression", "expression: str", "'(a + b)'"),
    ("the Fibonacci numbers up to n", "n: int", "10"),
    ("the lines of a file that contain a word", "path: str, word: str", "'a.txt', 'error'"),
    ("the temperatures of a week in Celsius", "fahrenheit: List[float]", "[32.0, 50.0]"),
    ("the pairs of numbers that add up to zero", "numbers: List[int]", "[1, -1, 2]"),
)

SUM = (
    "{n} friends share {m} {a}s equally. How many does each get?",
    "A {a} costs {n} dollars. How much do {m} of them cost?",
    "What is {n} plus {m}?",
    "What is {n} times {m}? Explain step by step.",
    "I had {m} {a}s and gave away {n}. How many are left?",
    "A train travels {m} miles in {n} hours. What is its speed?",
)

SYSTEM = (
    "You are a helpful assistant.",
    "You answer briefly.",
    "You are a friendly teacher who explains things step by step.",
    "You are an expert programmer.",
    "Answer in at most three sentences.",
    "You are a creative writer.",
)

GREETINGS = (
    "Hi!",
    "Hello, who are you?",
    "What can you do?",
    "Good morning! How are you?",
    "Tell me a joke.",
    "Help me to plan my week.",
    "I feel sad today.",
    "What should I cook tonight?",
    "Recommend me a book.",
    "How can I sleep better?",
)
