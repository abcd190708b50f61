"""Writes the demo's question-answering corpus: `python -m bft_hf.recipes.demo_corpus --output demo.jsonl.gz`.

Every passage states true facts about three things of one kind, so that a question about one of them has two wrong
answers of the same form beside the right one, and only reading tells them apart. Half of the questions name the thing
they ask about; the others describe it by another of its facts. What the validation passages are about occurs in no
training passage.
"""

import argparse
import gzip
import io
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bft_hf.recipes.questions import DEMO_FILE

TRAIN_PASSAGES, VALIDATION_PASSAGES = 42, 8  # of each topic
QUESTIONS = 3  # of each passage, at most
THINGS, FACTS = 3, 3  # in each passage, and about each thing
LONGEST = 90  # words of a passage


@dataclass(frozen=True)
class Attribute:
    """One kind of fact.

    Attributes:
        statements: Sentences that state it, with {e} for the thing and {v} for the value.
        questions: Ask for the value, with {e} for the thing's name or a description of it.
        reverse: Ask for the thing, with {v} for the value.
        description: Stands for the thing in a question about another of its facts, with {v} for the value.
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    reverse: tuple[str, ...]
    description: str


@dataclass(frozen=True)
class Topic:
    """Things of one kind and what is known about them.

    Attributes:
        name: In ids and titles.
        opening: First sentences, with {es} for the list of things.
        reference: How questions and sentences call a thing, with {e} for its name.
        attributes: In the order of the table's columns after the name.
        table: One thing a line, its columns separated by "|".
    """

    name: str
    opening: tuple[str, ...]
    reference: str
    attributes: tuple[Attribute, ...]
    table: str

    def rows(self) -> list[list[str]]:
        """The table, one list a thing: name, then the values."""
        return [[cell.strip() for cell in line.split("|")] for line in self.table.strip().splitlines()]


ELEMENTS = Topic(
    "elements",
    ("Three chemical elements are compared here: {es}.", "These notes from a chemistry class concern {es}."),
    "{e}",
    (
        Attribute(
            (
                "The chemical symbol of {e} is {v}.",
                "{e} is written {v} in formulas.",
                "Chemists abbreviate {e} as {v}.",
            ),
            ("What is the chemical symbol of {e}?", "How is {e} written in formulas?"),
            ("Which element has the symbol {v}?", "What does the symbol {v} stand for?"),
            "the element with the symbol {v}",
        ),
        Attribute(
            (
                "The atomic number of {e} is {v}.",
                "An atom of {e} has {v} protons.",
                "There are {v} protons in the nucleus of {e}.",
            ),
            ("What is the atomic number of {e}?", "How many protons does an atom of {e} have?"),
            ("Which element has the atomic number {v}?", "Whose atoms hold {v} protons?"),
            "the element with {v} protons",
        ),
        Attribute(
            ("{e} is found in group {v} of the periodic table.", "In the periodic table {e} stands in group {v}."),
            ("In which group of the periodic table is {e}?", "What is the number of the group that {e} belongs to?"),
            ("Which of the elements is in group {v}?",),
            "the element in group {v}",
        ),
    ),
    """
helium|He|2|18
lithium|Li|3|1
beryllium|Be|4|2
boron|B|5|13
carbon|C|6|14
nitrogen|N|7|15
oxygen|O|8|16
fluorine|F|9|17
neon|Ne|10|18
sodium|Na|11|1
magnesium|Mg|12|2
aluminium|Al|13|13
silicon|Si|14|14
phosphorus|P|15|15
sulfur|S|16|16
chlorine|Cl|17|17
argon|Ar|18|18
potassium|K|19|1
calcium|Ca|20|2
scandium|Sc|21|3
titanium|Ti|22|4
vanadium|V|23|5
chromium|Cr|24|6
manganese|Mn|25|7
iron|Fe|26|8
cobalt|Co|27|9
nickel|Ni|28|10
copper|Cu|29|11
zinc|Zn|30|12
gallium|Ga|31|13
germanium|Ge|32|14
arsenic|As|33|15
selenium|Se|34|16
bromine|Br|35|17
krypton|Kr|36|18
rubidium|Rb|37|1
strontium|Sr|38|2
zirconium|Zr|40|4
niobium|Nb|41|5
molybdenum|Mo|42|6
palladium|Pd|46|10
silver|Ag|47|11
cadmium|Cd|48|12
tin|Sn|50|14
antimony|Sb|51|15
iodine|I|53|17
xenon|Xe|54|18
caesium|Cs|55|1
barium|Ba|56|2
tungsten|W|74|6
platinum|Pt|78|10
gold|Au|79|11
mercury|Hg|80|12
lead|Pb|82|14
bismuth|Bi|83|15
radon|Rn|86|18
radium|Ra|88|2
""",
)

COUNTRIES = Topic(
    "countries",
    ("A short guide to three countries: {es}.", "This page of the atlas covers {es}."),
    "{e}",
    (
        Attribute(
            ("The capital of {e} is {v}.", "{e} is governed from {v}, its capital.", "{v} is the capital of {e}."),
            ("What is the capital of {e}?", "From which city is {e} governed?"),
            ("Which country has {v} as its capital?", "Of which country is {v} the capital?"),
            "the country whose capital is {v}",
        ),
        Attribute(
            ("{e} is a country in {v}.", "{e} lies in {v}."),
            ("On which continent is {e}?", "In which part of the world does {e} lie?"),
            ("Which of the countries lies in {v}?",),
            "the country in {v}",
        ),
        Attribute(
            ("The main language of {e} is {v}.", "Most people in {e} speak {v}.", "In {e} the main language is {v}."),
            ("What is the main language of {e}?", "Which language do most people in {e} speak?"),
            ("In which of the countries is {v} the main language?", "Where do most people speak {v}?"),
            "the country where most people speak {v}",
        ),
        Attribute(
            (
                "The currency of {e} is the {v}.",
                "People in {e} pay with the {v}.",
                "Prices in {e} are given in the local currency, the {v}.",
            ),
            ("What is the currency of {e}?", "What do people in {e} pay with?"),
            ("Which country uses the {v}?", "Where do people pay with the {v}?"),
            "the country that uses the {v}",
        ),
    ),
    """
Brazil|Brasília|South America|Portuguese|real
Argentina|Buenos Aires|South America|Spanish|peso
Peru|Lima|South America|Spanish|sol
Venezuela|Caracas|South America|Spanish|bolívar
Colombia|Bogotá|South America|Spanish|peso
Uruguay|Montevideo|South America|Spanish|peso
Chile|Santiago|South America|Spanish|peso
Cuba|Havana|North America|Spanish|peso
Honduras|Tegucigalpa|North America|Spanish|lempira
Costa Rica|San José|North America|Spanish|colón
Nicaragua|Managua|North America|Spanish|córdoba
Haiti|Port-au-Prince|North America|Haitian Creole|gourde
Canada|Ottawa|North America|English|dollar
Japan|Tokyo|Asia|Japanese|yen
South Korea|Seoul|Asia|Korean|won
China|Beijing|Asia|Mandarin|yuan
Mongolia|Ulaanbaatar|Asia|Mongolian|tögrög
Thailand|Bangkok|Asia|Thai|baht
Vietnam|Hanoi|Asia|Vietnamese|dong
Cambodia|Phnom Penh|Asia|Khmer|riel
Laos|Vientiane|Asia|Lao|kip
Nepal|Kathmandu|Asia|Nepali|rupee
Bangladesh|Dhaka|Asia|Bengali|taka
Iran|Tehran|Asia|Persian|rial
Saudi Arabia|Riyadh|Asia|Arabic|riyal
Jordan|Amman|Asia|Arabic|dinar
Myanmar|Naypyidaw|Asia|Burmese|kyat
Uzbekistan|Tashkent|Asia|Uzbek|som
Turkmenistan|Ashgabat|Asia|Turkmen|manat
Poland|Warsaw|Europe|Polish|złoty
Hungary|Budapest|Europe|Hungarian|forint
Denmark|Copenhagen|Europe|Danish|krone
Norway|Oslo|Europe|Norwegian|krone
Sweden|Stockholm|Europe|Swedish|krona
Iceland|Reykjavík|Europe|Icelandic|króna
Romania|Bucharest|Europe|Romanian|leu
Albania|Tirana|Europe|Albanian|lek
Serbia|Belgrade|Europe|Serbian|dinar
Germany|Berlin|Europe|German|euro
France|Paris|Europe|French|euro
Italy|Rome|Europe|Italian|euro
Portugal|Lisbon|Europe|Portuguese|euro
Greece|Athens|Europe|Greek|euro
Austria|Vienna|Europe|German|euro
Egypt|Cairo|Africa|Arabic|pound
Morocco|Rabat|Africa|Arabic|dirham
Algeria|Algiers|Africa|Arabic|dinar
Tunisia|Tunis|Africa|Arabic|dinar
Tanzania|Dodoma|Africa|Swahili|shilling
Somalia|Mogadishu|Africa|Somali|shilling
Angola|Luanda|Africa|Portuguese|kwanza
Madagascar|Antananarivo|Africa|Malagasy|ariary
Australia|Canberra|Oceania|English|dollar
""",
)

STATES = Topic(
    "states",
    ("Three of the United States are described here: {es}.", "A quiz about the United States asks about {es}."),
    "{e}",
    (
        Attribute(
            (
                "The capital of {e} is {v}.",
                "The legislature of {e} meets in {v}, the state capital.",
                "{v} is the capital of {e}.",
            ),
            ("What is the capital of {e}?", "Where does the legislature of {e} meet?"),
            ("Which state has {v} as its capital?", "Of which state is {v} the capital?"),
            "the state whose capital is {v}",
        ),
        Attribute(
            ("{e} became a state in {v}.", "{e} was admitted to the Union in {v}.", "In {v} {e} joined the Union."),
            ("When did {e} become a state?", "In which year was {e} admitted to the Union?"),
            ("Which state joined the Union in {v}?", "What was admitted to the Union in {v}?"),
            "the state admitted in {v}",
        ),
        Attribute(
            ("{e} is nicknamed the {v}.", "The nickname of {e} is the {v}.", "Many people call {e} the {v}."),
            ("What is the nickname of {e}?", "What do many people call {e}?"),
            ("Which state is nicknamed the {v}?", "What is known as the {v}?"),
            "the {v}",
        ),
    ),
    """
Vermont|Montpelier|1791|Green Mountain State
Kentucky|Frankfort|1792|Bluegrass State
Tennessee|Nashville|1796|Volunteer State
Ohio|Columbus|1803|Buckeye State
Louisiana|Baton Rouge|1812|Pelican State
Indiana|Indianapolis|1816|Hoosier State
Mississippi|Jackson|1817|Magnolia State
Illinois|Springfield|1818|Prairie State
Maine|Augusta|1820|Pine Tree State
Missouri|Jefferson City|1821|Show-Me State
Arkansas|Little Rock|1836|Natural State
Michigan|Lansing|1837|Great Lakes State
Florida|Tallahassee|1845|Sunshine State
Texas|Austin|1845|Lone Star State
Iowa|Des Moines|1846|Hawkeye State
Wisconsin|Madison|1848|Badger State
California|Sacramento|1850|Golden State
Minnesota|Saint Paul|1858|North Star State
Oregon|Salem|1859|Beaver State
Kansas|Topeka|1861|Sunflower State
West Virginia|Charleston|1863|Mountain State
Nevada|Carson City|1864|Silver State
Nebraska|Lincoln|1867|Cornhusker State
Colorado|Denver|1876|Centennial State
North Dakota|Bismarck|1889|Peace Garden State
South Dakota|Pierre|1889|Mount Rushmore State
Montana|Helena|1889|Treasure State
Idaho|Boise|1890|Gem State
Wyoming|Cheyenne|1890|Equality State
Utah|Salt Lake City|1896|Beehive State
Oklahoma|Oklahoma City|1907|Sooner State
New Mexico|Santa Fe|1912|Land of Enchantment
Arizona|Phoenix|1912|Grand Canyon State
Alaska|Juneau|1959|Last Frontier
Hawaii|Honolulu|1959|Aloha State
""",
)

RIVERS = Topic(
    "rivers",
    ("Three rivers are described below: {es}.", "A lesson on great rivers deals with {es}."),
    "the {e}",
    (
        Attribute(
            ("{e} flows into the {v}.", "{e} ends in the {v}.", "The waters of {e} reach the {v}."),
            ("Into which body of water does {e} flow?", "Where does {e} end?"),
            ("Which river flows into the {v}?", "Which of the rivers ends in the {v}?"),
            "the river that ends in the {v}",
        ),
        Attribute(
            (
                "On its way {e} passes the city of {v}.",
                "The city of {v} stands on {e}.",
                "{v} was built on the banks of {e}.",
            ),
            ("Which city stands on {e}?", "What city does {e} pass?"),
            ("On which river does {v} stand?", "Which river passes {v}?"),
            "the river at {v}",
        ),
        Attribute(
            ("{e} is a river in {v}.", "{e} crosses a part of {v}."),
            ("On which continent is {e}?", "Which continent does {e} belong to?"),
            ("Which of the rivers is in {v}?",),
            "the river in {v}",
        ),
    ),
    """
Danube|Black Sea|Vienna|Europe
Rhine|North Sea|Cologne|Europe
Rhône|Mediterranean Sea|Lyon|Europe
Seine|English Channel|Paris|Europe
Thames|North Sea|London|Europe
Elbe|North Sea|Hamburg|Europe
Oder|Baltic Sea|Wrocław|Europe
Vistula|Baltic Sea|Warsaw|Europe
Volga|Caspian Sea|Kazan|Europe
Dnieper|Black Sea|Kyiv|Europe
Don|Sea of Azov|Rostov|Europe
Ebro|Mediterranean Sea|Zaragoza|Europe
Tagus|Atlantic Ocean|Lisbon|Europe
Loire|Atlantic Ocean|Nantes|Europe
Po|Adriatic Sea|Turin|Europe
Nile|Mediterranean Sea|Cairo|Africa
Niger|Gulf of Guinea|Bamako|Africa
Congo|Atlantic Ocean|Kinshasa|Africa
Mississippi|Gulf of Mexico|New Orleans|North America
Hudson|Atlantic Ocean|New York|North America
Yukon|Bering Sea|Whitehorse|North America
Amazon|Atlantic Ocean|Iquitos|South America
Ganges|Bay of Bengal|Varanasi|Asia
Mekong|South China Sea|Phnom Penh|Asia
Yangtze|East China Sea|Wuhan|Asia
Irrawaddy|Andaman Sea|Mandalay|Asia
Lena|Laptev Sea|Yakutsk|Asia
Yenisei|Kara Sea|Krasnoyarsk|Asia
Indus|Arabian Sea|Sukkur|Asia
""",
)

MOUNTAINS = Topic(
    "mountains",
    ("Climbers have long been drawn to {es}.", "Three mountains appear in this chapter: {es}."),
    "{e}",
    (
        Attribute(
            (
                "The summit of {e} is {v} metres high.",
                "{e} rises to {v} metres.",
                "At {v} metres, {e} is a hard climb for many.",
            ),
            ("How many metres high is {e}?", "To how many metres does {e} rise?"),
            ("Which mountain is {v} metres high?", "Whose summit stands at {v} metres?"),
            "the mountain that is {v} metres high",
        ),
        Attribute(
            ("{e} belongs to the {v}.", "{e} is one of the peaks of the {v}."),
            ("To which mountain range does {e} belong?", "Of which range is {e} a peak?"),
            ("Which mountain belongs to the {v}?", "Which of them is a peak of the {v}?"),
            "the mountain in the {v}",
        ),
        Attribute(
            ("{e} was first climbed in {v}.", "The first climbers reached the top of {e} in {v}."),
            ("When was {e} first climbed?", "In which year did climbers first reach the top of {e}?"),
            ("Which mountain was first climbed in {v}?", "Whose top was first reached in {v}?"),
            "the mountain first climbed in {v}",
        ),
    ),
    """
Mount Everest|8,849|Himalayas|1953
K2|8,611|Karakoram|1954
Annapurna|8,091|Himalayas|1950
Nanga Parbat|8,126|Himalayas|1953
Kangchenjunga|8,586|Himalayas|1955
Lhotse|8,516|Himalayas|1956
Manaslu|8,163|Himalayas|1956
Gasherbrum I|8,080|Karakoram|1958
Dhaulagiri|8,167|Himalayas|1960
Broad Peak|8,051|Karakoram|1957
Aconcagua|6,961|Andes|1897
Chimborazo|6,263|Andes|1880
Denali|6,190|Alaska Range|1913
Mount Logan|5,959|Saint Elias Mountains|1925
Mount Rainier|4,392|Cascade Range|1870
Mount Whitney|4,421|Sierra Nevada|1873
Matterhorn|4,478|Alps|1865
Eiger|3,967|Alps|1858
Zugspitze|2,962|Alps|1820
Grossglockner|3,798|Alps|1800
Jungfrau|4,158|Alps|1811
Mount Cook|3,724|Southern Alps|1894
Mount Robson|3,954|Rocky Mountains|1913
Vinson Massif|4,892|Ellsworth Mountains|1966
Puncak Jaya|4,884|Sudirman Range|1962
""",
)

BOOKS = Topic(
    "books",
    ("On the library's list this month are {es}.", "Three books are on the shelf: {es}."),
    "{e}",
    (
        Attribute(
            ("{e} was written by {v}.", "The author of {e} is {v}.", "{v} wrote {e}."),
            ("Who wrote {e}?", "Who is the author of {e}?"),
            ("Which book was written by {v}?", "What did {v} write?"),
            "the book by {v}",
        ),
        Attribute(
            ("{e} was first published in {v}.", "{e} first appeared in {v}.", "In {v} {e} came out."),
            ("When was {e} first published?", "In which year did {e} first appear?"),
            ("Which book was first published in {v}?", "What came out in {v}?"),
            "the book published in {v}",
        ),
        Attribute(
            ("{e} was written in {v}.", "The original language of {e} is {v}."),
            ("In which language was {e} written?", "What is the original language of {e}?"),
            ("Which of the books was written in {v}?",),
            "the book written in {v}",
        ),
    ),
    """
Pride and Prejudice|Jane Austen|1813|English
Frankenstein|Mary Shelley|1818|English
Jane Eyre|Charlotte Brontë|1847|English
Wuthering Heights|Emily Brontë|1847|English
Moby-Dick|Herman Melville|1851|English
Les Misérables|Victor Hugo|1862|French
Fathers and Sons|Ivan Turgenev|1862|Russian
Dracula|Bram Stoker|1897|English
The Time Machine|H. G. Wells|1895|English
Buddenbrooks|Thomas Mann|1901|German
The Metamorphosis|Franz Kafka|1915|German
Siddhartha|Hermann Hesse|1922|German
The Great Gatsby|F. Scott Fitzgerald|1925|English
Mrs Dalloway|Virginia Woolf|1925|English
Brave New World|Aldous Huxley|1932|English
The Hobbit|J. R. R. Tolkien|1937|English
Rebecca|Daphne du Maurier|1938|English
Animal Farm|George Orwell|1945|English
The Stranger|Albert Camus|1942|French
The Little Prince|Antoine de Saint-Exupéry|1943|French
The Catcher in the Rye|J. D. Salinger|1951|English
Pedro Páramo|Juan Rulfo|1955|Spanish
The Tin Drum|Günter Grass|1959|German
To Kill a Mockingbird|Harper Lee|1960|English
Hopscotch|Julio Cortázar|1963|Spanish
Things Fall Apart|Chinua Achebe|1958|English
One Hundred Years of Solitude|Gabriel García Márquez|1967|Spanish
The House of the Spirits|Isabel Allende|1982|Spanish
The Name of the Rose|Umberto Eco|1980|Italian
If This Is a Man|Primo Levi|1947|Italian
Beloved|Toni Morrison|1987|English
Don Quixote|Miguel de Cervantes|1605|Spanish
Candide|Voltaire|1759|French
Nausea|Jean-Paul Sartre|1938|French
Lord of the Flies|William Golding|1954|English
Fahrenheit 451|Ray Bradbury|1953|English
Emma|Jane Austen|1815|English
Steppenwolf|Hermann Hesse|1927|German
The Magic Mountain|Thomas Mann|1924|German
Gulliver's Travels|Jonathan Swift|1726|English
Robinson Crusoe|Daniel Defoe|1719|English
""",
)

MOONS = Topic(
    "moons",
    ("An evening talk at the observatory is about the moons {es}.", "Three moons are discussed here: {es}."),
    "{e}",
    (
        Attribute(
            ("{e} circles {v}.", "{e} is a moon of {v}.", "The planet that {e} circles is {v}."),
            ("Which planet does {e} circle?", "Of which planet is {e} a moon?"),
            ("Which of the moons circles {v}?",),
            "the moon of {v}",
        ),
        Attribute(
            ("{e} was discovered by {v}.", "The discoverer of {e} was {v}.", "{v} discovered {e}."),
            ("Who discovered {e}?", "Who was the discoverer of {e}?"),
            ("Which moon was discovered by {v}?", "What did {v} discover?"),
            "the moon that {v} discovered",
        ),
        Attribute(
            (
                "{e} has been known since {v}.",
                "The year in which {e} was discovered is {v}.",
                "{e} was first seen in {v}.",
            ),
            ("In which year was {e} first seen?", "Since which year has {e} been known?"),
            ("Which moon has been known since {v}?", "Which of the moons was discovered in {v}?"),
            "the moon discovered in {v}",
        ),
    ),
    """
Phobos|Mars|Asaph Hall|1877
Deimos|Mars|Asaph Hall|1877
Io|Jupiter|Galileo Galilei|1610
Europa|Jupiter|Galileo Galilei|1610
Ganymede|Jupiter|Galileo Galilei|1610
Callisto|Jupiter|Galileo Galilei|1610
Amalthea|Jupiter|Edward Emerson Barnard|1892
Titan|Saturn|Christiaan Huygens|1655
Iapetus|Saturn|Giovanni Cassini|1671
Rhea|Saturn|Giovanni Cassini|1672
Tethys|Saturn|Giovanni Cassini|1684
Dione|Saturn|Giovanni Cassini|1684
Mimas|Saturn|William Herschel|1789
Enceladus|Saturn|William Herschel|1789
Phoebe|Saturn|William Henry Pickering|1899
Titania|Uranus|William Herschel|1787
Oberon|Uranus|William Herschel|1787
Ariel|Uranus|William Lassell|1851
Umbriel|Uranus|William Lassell|1851
Miranda|Uranus|Gerard Kuiper|1948
Triton|Neptune|William Lassell|1846
Nereid|Neptune|Gerard Kuiper|1949
""",
)

PEOPLE = Topic(
    "people",
    ("The museum's new room shows portraits of {es}.", "Three lives are told in this booklet: {es}."),
    "{e}",
    (
        Attribute(
            ("{e} was born in the year {v}.", "The year of birth of {e} is {v}.", "In {v} {e} was born."),
            ("In which year was {e} born?", "What is the year of birth of {e}?"),
            ("Who was born in the year {v}?",),
            "the person born in {v}",
        ),
        Attribute(
            ("The birthplace of {e} is {v}.", "{e} came from {v}.", "{v} is where {e} was born."),
            ("What is the birthplace of {e}?", "Where was {e} born?"),
            ("Who came from {v}?", "Whose birthplace is {v}?"),
            "the person from {v}",
        ),
        Attribute(
            ("{e} is remembered as a {v}.", "The profession of {e} was {v}."),
            ("What was the profession of {e}?", "As what is {e} remembered?"),
            ("Which of the three was a {v}?", "Who is remembered as a {v}?"),
            "the {v}",
        ),
    ),
    """
Albert Einstein|1879|Ulm|physicist
Marie Curie|1867|Warsaw|chemist
Charles Darwin|1809|Shrewsbury|naturalist
Louis Pasteur|1822|Dole|microbiologist
James Clerk Maxwell|1831|Edinburgh|physicist
Niels Bohr|1885|Copenhagen|physicist
Max Planck|1858|Kiel|physicist
Werner Heisenberg|1901|Würzburg|physicist
Erwin Schrödinger|1887|Vienna|physicist
Paul Dirac|1902|Bristol|physicist
Enrico Fermi|1901|Rome|physicist
Alan Turing|1912|London|mathematician
Carl Friedrich Gauss|1777|Brunswick|mathematician
Leonhard Euler|1707|Basel|mathematician
Nicolaus Copernicus|1473|Toruń|astronomer
Edwin Hubble|1889|Marshfield|astronomer
Heinrich Hertz|1857|Hamburg|physicist
Alessandro Volta|1745|Como|physicist
Linus Pauling|1901|Portland|chemist
Gottfried Leibniz|1646|Leipzig|philosopher
Johann Sebastian Bach|1685|Eisenach|composer
Wolfgang Amadeus Mozart|1756|Salzburg|composer
Ludwig van Beethoven|1770|Bonn|composer
Franz Schubert|1797|Vienna|composer
Johannes Brahms|1833|Hamburg|composer
Antonio Vivaldi|1678|Venice|composer
George Frideric Handel|1685|Halle|composer
Gioachino Rossini|1792|Pesaro|composer
Giacomo Puccini|1858|Lucca|composer
Edvard Grieg|1843|Bergen|composer
Immanuel Kant|1724|Königsberg|philosopher
David Hume|1711|Edinburgh|philosopher
Jean-Jacques Rousseau|1712|Geneva|philosopher
Pablo Picasso|1881|Málaga|painter
Claude Monet|1840|Paris|painter
Gustav Klimt|1862|Baumgarten|painter
Albrecht Dürer|1471|Nuremberg|painter
Rembrandt|1606|Leiden|painter
Charles Dickens|1812|Portsmouth|novelist
Jane Austen|1775|Steventon|novelist
""",
)

TOPICS = (ELEMENTS, COUNTRIES, STATES, RIVERS, MOUNTAINS, BOOKS, MOONS, PEOPLE)


def corpus(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Make the questions: rows with id, title, context, question, answers (one text, found in the context), split."""
    for topic in TOPICS:
        # One generator a topic: adding a topic leaves the passages of the others as they are.
        rng = random.Random(f"{seed} {topic.name}")
        rows = topic.rows()
        rng.shuffle(rows)
        held_out = max(THINGS + 3, len(rows) // 5)
        pools = {"train": (rows[held_out:], TRAIN_PASSAGES), "validation": (rows[:held_out], VALIDATION_PASSAGES)}
        for split, (pool, count) in pools.items():
            seen: set[frozenset[str]] = set()
            while len(seen) < count:
                things = rng.sample(pool, THINGS)
                names = frozenset(thing[0] for thing in things)
                columns = sorted(rng.sample(range(len(topic.attributes)), FACTS))
                questions = _questions(topic, things, columns, rng)
                context = _passage(topic, things, columns, rng)
                if names in seen or len(questions) < 2 or len(context.split()) > LONGEST:
                    continue
                seen.add(names)
                for number, (question, answer) in enumerate(questions):
                    yield {
                        "id": f"{topic.name}-{split}-{len(seen):03d}-{number}",
                        "title": f"{topic.name}-{split}-{len(seen):03d}",
                        "context": context,
                        "question": question,
                        "answers": [answer],
                        "split": split,
                    }


def _passage(topic: Topic, things: Sequence[Sequence[str]], columns: Sequence[int], rng: random.Random) -> str:
    names = [topic.reference.format(e=thing[0]) for thing in things]
    opening = rng.choice(topic.opening).format(es=f"{names[0]}, {names[1]} and {names[2]}")
    order = [(thing, column) for thing in range(len(things)) for column in columns]
    layout = rng.choice(("by thing", "by attribute", "mixed"))
    if layout == "by attribute":
        order.sort(key=lambda place: place[1])
    elif layout == "mixed":
        rng.shuffle(order)
    sentences = [
        rng.choice(topic.attributes[column].statements).format(e=names[thing], v=things[thing][column + 1])
        for thing, column in order
    ]
    return " ".join(_capitalized(sentence) for sentence in (opening, *sentences))


def _questions(
    topic: Topic, things: Sequence[Sequence[str]], columns: Sequence[int], rng: random.Random
) -> list[tuple[str, str]]:
    """Draw (question, answer) pairs, each of which needs the passage: another thing has another value."""
    direct, described = [], []
    for thing in things:
        for column in columns:
            attribute, value = topic.attributes[column], thing[column + 1]
            values = [other[column + 1] for other in things]
            if values.count(value) == 1:
                direct.append((rng.choice(attribute.reverse).format(v=value), thing[0]))
            if len(set(values)) == 1:
                continue
            ask = rng.choice(attribute.questions)
            direct.append((ask.format(e=topic.reference.format(e=thing[0])), value))
            for by in columns:
                if by != column and [other[by + 1] for other in things].count(thing[by + 1]) == 1:
                    description = topic.attributes[by].description.format(v=thing[by + 1])
                    described.append((ask.format(e=description), value))
    rng.shuffle(direct)
    rng.shuffle(described)
    chosen: list[tuple[str, str]] = []
    # Alternating, and never one answer twice: two questions of a passage test two of its facts.
    for pair in (pair for both in zip(described, direct, strict=False) for pair in both):
        given_away = re.search(rf"\b{re.escape(pair[1])}\b", pair[0])
        if not given_away and pair[1] not in [answer for _, answer in chosen]:
            chosen.append(pair)
    return chosen[: rng.choice((2, QUESTIONS))]


def _capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def write(path: Path, seed: int = 0) -> int:
    """Write the corpus as JSONL, gzipped if the name ends in .gz, the same bytes each time; give the row count."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in corpus(seed)]
    content = "".join(lines).encode()
    if path.suffix == ".gz":
        buffer = io.BytesIO()
        # Neither a file name nor a time in the header, or two runs would differ.
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
            file.write(content)
        content = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bft_hf.recipes.demo_corpus", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=DEMO_FILE, help="a .jsonl or .jsonl.gz file (default: the shipped one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed makes another corpus (default: 0)")
    options = parser.parse_args(arguments)
    count = write(options.output, options.seed)
    print(f"{count} questions written to {options.output}")


if __name__ == "__main__":
    main()
