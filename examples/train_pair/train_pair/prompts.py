"""Prompts for a chat model that writes text to train a draft on: questions about topics, and beginnings of sentences.
Nothing is downloaded."""

from __future__ import annotations

import random

HELD_OUT = 12
"""One of this many topics is used only for measurement."""

TOPICS = """
    black holes|photosynthesis|the water cycle|volcanoes|earthquakes|the human heart|the immune system|vaccines
    DNA|evolution|gravity|electricity|magnets|light|sound|atoms|the periodic table|acids and bases|friction
    energy|climate change|rainforests|deserts|oceans|coral reefs|whales|dolphins|elephants|bees|butterflies|ants
    birds|dogs|cats|horses|dinosaurs|fossils|the Roman Empire|ancient Egypt|ancient Greece|the Middle Ages
    the Renaissance|the Industrial Revolution|the printing press|the French Revolution|the Silk Road|the Vikings
    the Great Wall of China|the Moon landing|space travel|Mars|the solar system|galaxies|telescopes|satellites
    airplanes|trains|bicycles|cars|ships|bridges|skyscrapers|computers|the internet|programming|Python|databases
    algorithms|sorting numbers|recursion|web browsers|email|passwords|encryption|robots|machine learning
    neural networks|statistics|probability|fractions|percentages|algebra|geometry|calculus|prime numbers|pi
    chess|football|basketball|tennis|swimming|running|yoga|hiking|camping|cooking pasta|baking bread|soup|salads
    chocolate|coffee|tea|healthy food|vitamins|sleep|stress|meditation|exercise|friendship|happiness|kindness
    honesty|courage|patience|teamwork|leadership|money|saving money|budgets|taxes|banks|jobs|interviews
    writing a letter|writing an essay|poetry|novels|Shakespeare|fairy tales|music|the piano|the guitar|drums
    jazz|opera|painting|sculpture|photography|film|theater|dance|fashion|architecture|gardening|trees|flowers
    vegetables|recycling|plastic|solar power|wind power|batteries|democracy|voting|laws|courts|schools|libraries
    museums|Paris|London|New York|Tokyo|India|Brazil|Africa|Australia|Antarctica|mountains|rivers|islands|maps
    weather|snow|rain
""".replace("\n", "|")

QUESTIONS = (
    "Explain {} to a child.",
    "What is important to know about {}?",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "Write a short story that involves {}.",
    "What are the advantages and disadvantages of {}?",
    "How would you teach {} in a class?",
    "Write a list of questions about {}.",
    "Summarize the history of {}.",
    "Why do people care about {}?",
    "Write a poem about {}.",
    "Compare {} with something else.",
    "Describe {} in detail, step by step.",
    "What is a common mistake about {}?",
    "Write an email to a friend about {}.",
    "Give three tips about {}.",
)

PAIR_QUESTIONS = (
    "What do {} and {} have in common?",
    "Which came first, {} or {}?",
    "Write a dialogue between two friends, one of whom likes {} and the other {}.",
    "How does {} depend on {}?",
    "Tell me about {}, then about {}.",
    "Explain {} with an example from {}.",
    "Write a quiz with answers about {} and {}.",
    "Plan a day of lessons about {} and {}.",
)
"""Questions about two topics: there are enough pairs that no text has to be generated twice."""

BEGINNINGS = (
    "The history of {} begins",
    "In this article, we will look at {}",
    "When people talk about {}, they often",
    "A teacher once asked her class about {}, and",
    "Three things about {}:",
)

Prompt = str | list[dict[str, str]]


def make_prompts(count: int, *, held_out: bool, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts. Of every four, one is a question about one topic, two are about two topics, and one is
    the beginning of a sentence. Held-out prompts share no topic with the others."""
    topics = [topic.strip() for topic in TOPICS.split("|") if topic.strip()]
    selected = [topic for place, topic in enumerate(topics) if (place % HELD_OUT == 0) is held_out]
    rng = random.Random(seed)

    def prompt(place: int) -> Prompt:
        templates = (BEGINNINGS, QUESTIONS, PAIR_QUESTIONS, PAIR_QUESTIONS)[place % 4]
        text = rng.choice(templates).format(*rng.sample(selected, 2))
        return text if templates is BEGINNINGS else [{"role": "user", "content": text}]

    return [prompt(place) for place in range(count)]
