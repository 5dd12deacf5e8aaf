"""Training prompts that need no download: templates over topics, and functions of Python's own standard library.

    python recipes/smollm2/make_prompts.py --output_file prompts.jsonl [--extra_prompts FILE.jsonl ...]

One JSON object a line, `{"messages": [{"role": "user", "content": ...}]}`, shuffled with a fixed seed, so that any
prefix of the file is the same mixture of chat, code and what `--extra_prompts` adds. `--extra_per_kind` bounds how many
rows each extra file gives.
"""

import argparse
import ast
import json
import pkgutil
import random
import sysconfig
from pathlib import Path

TOPICS = """photosynthesis|plate tectonics|the water cycle|black holes|the French Revolution|supply and demand|inflation
the Roman Empire|machine learning|neural networks|blockchain|climate change|renewable energy|solar panels|wind turbines
electric cars|the human heart|the immune system|vaccines|antibiotics|DNA replication|protein synthesis|evolution
natural selection|ecosystems|coral reefs|rainforests|deserts|volcanoes|earthquakes|hurricanes|the Industrial Revolution
World War II|the Cold War|the Silk Road|ancient Egypt|ancient Greece|the Renaissance|impressionist painting|jazz music
classical music|Shakespeare|poetry|science fiction|detective novels|film making|photography|chess|football
marathon running|yoga|meditation|healthy eating|home cooking|baking bread|gardening|beekeeping|house plants|dog training|cats
bird watching|hiking|camping|travel on a budget|public transport|urban planning|architecture|bridges|skyscrapers|trains
airplanes|rockets|the Moon landing|Mars exploration|telescopes|the solar system|gravity|relativity|quantum mechanics
electromagnetism|thermodynamics|acids and bases|the periodic table|chemical bonds|polymers|steel making|3D printing
robotics|computer networks|operating systems|databases|sorting algorithms|recursion|cryptography|cyber security
cloud computing|open source software|version control|software testing|web development|mobile apps|video games|virtual reality
social media|journalism|advertising|small businesses|entrepreneurship|personal finance|saving money|credit cards|taxes
insurance|mortgages|stock markets|international trade|globalization|democracy|constitutions|human rights
the United Nations|education|online courses|study habits|time management|job interviews|remote work|teamwork|leadership|public
speaking|negotiation|customer service|conflict resolution|stress|sleep|exercise|mental health|first aid|dental care
philosophy of ethics|stoicism|existentialism|utilitarianism|logic puzzles|probability|statistics|linear algebra
calculus|geometry|prime numbers|number systems|languages|grammar|translation|libraries|museums|festivals|weddings
coffee|tea|chocolate|cheese|wine|street food|fashion|recycling|plastic pollution|water scarcity|agriculture|forestry
fisheries|oceans|rivers|lakes|glaciers|mountains|islands|maps|compasses|clocks|calendars|bicycles|batteries|microchips"""

CHAT = """Explain {t} to a beginner.
What is {t} and why does it matter?
Write a short blog post about {t}.
Write a short story in which {t} plays an important role.
Write a poem about {t}.
Give me five interesting facts about {t}.
What are the main advantages and disadvantages of {t}?
Write a persuasive email to a friend about {t}.
Imagine you are an expert on {t}. How would you answer a curious student's first question?
Pretend to be a historian from the future. Describe how people today think about {t}.
Act as a teacher and prepare a short lesson on {t}.
Summarize the history of {t} in one paragraph.
Compare {t} with {u}. What do they have in common and how do they differ?
How are {t} and {u} related?
List the steps that someone should take to learn more about {t}.
What common mistakes do people make about {t}?
Write a dialogue between two friends who disagree about {t}.
Draft an outline for an essay on {t}, with an introduction, three main points and a conclusion.
Describe a vivid scene that involves {t}, using at least two of the senses.
What are the ethical questions raised by {t}?
Write a product description for a new book about {t}.
Suggest ten titles for a magazine article about {t}.
Write a formal letter that asks the city council to support a project about {t}.
Extract the key terms from this sentence and return them as a JSON list: "Many people who study {t} are also interested in {u}."
Classify the following headline as science, business, culture or sport and explain: "New report on {t} surprises readers".
Rewrite this sentence in a more formal tone: "Honestly, {t} is way cooler than {u}."
What questions would you ask in an interview with someone who works on {t}?
Create a quiz with three multiple-choice questions about {t}.
Explain {t} using an analogy with {u}.
What would happen if {t} disappeared tomorrow?
Write a haiku and a limerick about {t}.
Design a one-day workshop about {t} for teenagers.
You are a helpful travel guide. Recommend a place to visit for someone who loves {t}.
Write an engaging introduction for a podcast episode on {t}.
Give a balanced argument for and against spending public money on {t}."""

PROGRAMS = r"""Write a Python function that {c}.
Write a Python function that {c}. Explain how it works.
Write a Python program that {c} and prints the result.
Write a C++ program that {c}.
Write a JavaScript function that {c}.
How would you write code that {c}? What is its time complexity?
Complete this Python function:\n```python\ndef {f}({a}):\n    \"\"\" {C}.\n    \"\"\"\n\n```
Complete this Python function:\n```python\nfrom typing import List, Optional\n\n\ndef {f}({a}):\n    \"\"\"\n    {C}.\n    \"\"\"\n\n```
Complete this Python function:\n```python\n\ndef {f}({a}):\n    '''\n    Given {g}, {f} {c}.\n    Return the result; for an empty input return the neutral value.\n    '''\n\n```"""

# what it does | name | typed arguments | the input in words
FUNCTIONS = """counts the vowels in a string|count_vowels|text: str|a string
reverses the words of a sentence|reverse_words|sentence: str|a sentence
checks whether a string is a palindrome|is_palindrome|text: str|a string
returns the n-th Fibonacci number|fib|n: int|an integer n
returns the factorial of n|factorial|n: int|an integer n
checks whether a number is prime|is_prime|n: int|an integer n
returns all primes below n|primes_below|n: int|an integer n
computes the greatest common divisor of two numbers|gcd|a: int, b: int|two integers
computes the least common multiple of two numbers|lcm|a: int, b: int|two integers
returns the sum of the even numbers in a list|sum_even|numbers: List[int]|a list of integers
returns the product of the odd numbers in a list|product_odd|numbers: List[int]|a list of integers
finds the second largest number in a list|second_largest|numbers: List[int]|a list of integers
removes duplicates from a list and keeps the order|unique|items: list|a list
rotates a list to the right by k places|rotate|items: list, k: int|a list and an integer k
merges two sorted lists into one sorted list|merge_sorted|a: List[int], b: List[int]|two sorted lists
returns the intersection of two lists in sorted order|common|a: list, b: list|two lists
flattens a list of lists|flatten|nested: List[list]|a list of lists
returns the running maximum of a list|running_max|numbers: List[int]|a list of integers
returns the longest word in a sentence|longest_word|sentence: str|a sentence
counts how often each character occurs in a string|char_counts|text: str|a string
checks whether two strings are anagrams|are_anagrams|a: str, b: str|two strings
converts a decimal number to binary as a string|to_binary|n: int|an integer n
converts a Roman numeral to an integer|roman_to_int|numeral: str|a Roman numeral
converts a temperature from Celsius to Fahrenheit|to_fahrenheit|celsius: float|a temperature
computes the mean of a list of numbers|mean|numbers: List[float]|a list of numbers
computes the median of a list of numbers|median|numbers: List[float]|a list of numbers
computes the standard deviation of a list of numbers|std_dev|numbers: List[float]|a list of numbers
scales a list of numbers to the range from 0 to 1|rescale|numbers: List[float]|a list of numbers
finds the two numbers in a list that are closest to each other|closest_pair|numbers: List[float]|a list of numbers
returns the indices of two numbers that add up to a target|two_sum|numbers: List[int], target: int|a list and a target
sorts a list with bubble sort|bubble_sort|numbers: List[int]|a list of integers
sorts a list with quicksort|quicksort|numbers: List[int]|a list of integers
searches a sorted list by binary search|binary_search|numbers: List[int], target: int|a sorted list and a target
transposes a matrix|transpose|matrix: List[List[int]]|a matrix
multiplies two matrices|matmul|a: List[List[int]], b: List[List[int]]|two matrices
computes the sum of the diagonal of a square matrix|trace|matrix: List[List[int]]|a square matrix
checks whether the brackets in a string are balanced|balanced|brackets: str|a string of brackets
splits a string of parentheses into balanced groups|split_groups|text: str|a string of parentheses
encodes a string with a Caesar cipher|encode_shift|text: str, shift: int|a string and a shift
decodes a string that was encoded with a Caesar cipher|decode_shift|text: str, shift: int|a string and a shift
compresses a string by run-length encoding|run_length|text: str|a string
removes all vowels from a string|remove_vowels|text: str|a string
swaps upper and lower case in a string|flip_case|text: str|a string
capitalizes the first letter of every word|title_case|text: str|a string
counts the words in a text file|count_words|path: str|a path
reads a CSV file and returns its rows as dictionaries|read_rows|path: str|a path
returns the strings of a list that start with a prefix|filter_prefix|strings: List[str], prefix: str|a list of strings and a prefix
returns the strings of a list that contain a substring|filter_substring|strings: List[str], part: str|a list of strings and a substring
joins a list of strings with a delimiter|join_with|strings: List[str], delimiter: str|a list of strings and a delimiter
inserts a number between every two elements of a list|intersperse|numbers: List[int], delimiter: int|a list of integers
returns the digits of a number in reverse order|reverse_digits|n: int|an integer n
computes the sum of the digits of a number|digit_sum|n: int|an integer n
checks whether a year is a leap year|is_leap_year|year: int|a year
computes the area of a triangle from its sides|triangle_area|a: float, b: float, c: float|three sides
computes the distance between two points|distance|p: tuple, q: tuple|two points
evaluates a polynomial at a point|poly|xs: list, x: float|a list of coefficients and a point
computes compound interest|compound|principal: float, rate: float, years: int|an amount, a rate and years
returns the n smallest elements of a list|n_smallest|numbers: List[int], n: int|a list and n
groups a list of words by their first letter|group_words|words: List[str]|a list of words
checks whether all elements of a list are below a threshold|below_threshold|numbers: List[int], t: int|a list and a threshold
returns only the positive numbers in a list|get_positive|numbers: List[int]|a list of integers
computes the derivative of a polynomial|derivative|xs: list|a list of coefficients
validates an email address|valid_email|address: str|an address
generates a random password of a given length|make_password|length: int|a length
finds the longest common prefix of a list of strings|common_prefix|strings: List[str]|a list of strings
computes the edit distance between two strings|edit_distance|a: str, b: str|two strings
finds the shortest path in a graph by breadth-first search|shortest_path|graph: dict, start: str, goal: str|a graph and two nodes
computes the depth of a nested list|depth|nested: list|a nested list
counts the number of islands in a grid|count_islands|grid: List[List[int]]|a grid of zeros and ones
returns the largest sum of a contiguous part of a list|max_subarray|numbers: List[int]|a list of integers"""


def chat_prompts() -> list[str]:
    """Every task with every topic; the second topic of a pair is drawn with a fixed seed."""
    draw = random.Random(1)
    topics = [topic.strip() for topic in TOPICS.replace("\n", "|").split("|")]
    return [task.format(t=t, u=draw.choice(topics)) for task in CHAT.splitlines() for t in topics]


def program_prompts() -> list[str]:
    """Every kind of request with every function description."""
    prompts = []
    for line in FUNCTIONS.splitlines():
        what, name, arguments, given = line.split("|")
        sentence = what[0].upper() + what[1:]
        for template in PROGRAMS.splitlines():
            text = template.replace("\\n", "\n").replace('\\"', '"')
            prompts.append(text.format(c=what, C=sentence, f=name, a=arguments, g=given))
    return prompts


def library_prompts(max_chars: int = 700) -> list[str]:
    """Headers and docstrings of the standard library's module-level functions, to be completed."""
    prompts = []
    for module in sorted(pkgutil.iter_modules([sysconfig.get_paths()["stdlib"]]), key=lambda m: m.name):
        path = Path(sysconfig.get_paths()["stdlib"]) / f"{module.name}.py"
        if not path.exists():
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1
            if not documented or node.name.startswith("__"):
                continue
            lines = source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
            indent = len(lines[0]) - len(lines[0].lstrip())
            header = "\n".join(line[indent:] for line in lines)
            if 80 < len(header) < max_chars:
                prompts.append(f"Complete this Python function:\n```python\n{header}\n\n```")
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--extra_prompts", nargs="*", default=[], help="JSONL files whose rows carry `messages`")
    parser.add_argument("--extra_per_kind", type=int, default=2500, help="rows taken from each extra file")
    parser.add_argument("--per_kind", type=int, default=2500, help="rows taken of each kind made here")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    draw = random.Random(arguments.seed)
    kinds = [chat_prompts(), program_prompts(), library_prompts()]
    prompts = []
    for kind in kinds:
        draw.shuffle(kind)
        prompts += [[{"role": "user", "content": text}] for text in kind[: arguments.per_kind]]
    for path in arguments.extra_prompts:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line)["messages"] for line in file]
        draw.shuffle(rows)
        prompts += rows[: arguments.extra_per_kind]
    draw.shuffle(prompts)
    with open(arguments.output_file, "w", encoding="utf-8") as file:
        for messages in prompts:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts -> {arguments.output_file}")


if __name__ == "__main__":
    main()
