// Texts of tokens, where their parts occurred, and what followed: the index of the drafting method `suffix`.
//
// For every token two chains of hashed occurrences, of the last 2 and the last 6 tokens, the latest first: what LZ77
// compressors look matches up with (zlib's deflate). To look a text's end up, its chains are followed; how long the text
// before an occurrence agrees with the end is counted token by token. Adding and forgetting a token take constant time.
//
// Each occurrence votes for its next token, with the cube of the length that agrees up to there. A token's probability
// is its share of the votes, of which an occurrence that was never seen has some too (the escape of PPM compressors).

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

namespace {

constexpr int kNumChains = 2;
constexpr int kGrams[kNumChains] = {6, 2};  // the longer first
constexpr int kLongest = 32;                // tokens that are compared
constexpr int kMostOccurrences = 16;        // of each chain that are looked at
constexpr double kEscape = 32;              // votes
constexpr int kHorizon = 8;                 // next tokens of which some are expected to be right

struct Index {
  std::vector<int32_t> text;
  size_t begin = 0;  // what is before it was forgotten
  // A place is the number of tokens before it, 0 is none. heads: of each hash the latest place. before: of each place,
  // at index place - 1, the one of equal hash before it.
  std::vector<int32_t> heads[kNumChains], before[kNumChains];
};

// An occurrence of the end of a text: the tokens that followed it, and how many before it agree.
struct Occurrence {
  const int32_t* next;
  size_t num_next;
  int length;
  bool goes_on;  // behind its last token comes what is drafted: it is in the text that is continued
};

size_t slot(const int32_t* end, int gram, size_t num_slots) {
  uint64_t hash = 0;
  for (int i = 1; i <= gram; i++) hash = (hash ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15ull;
  return (hash >> 20) & (num_slots - 1);
}

void chain_up(Index& index, size_t place) {
  for (int c = 0; c < kNumChains; c++) {
    int32_t before = 0;
    if (place >= index.begin + kGrams[c]) {
      int32_t& head = index.heads[c][slot(index.text.data() + place, kGrams[c], index.heads[c].size())];
      before = head;
      head = static_cast<int32_t>(place);
    }
    index.before[c].push_back(before);
  }
}

// Make room for twice the text's hashes.
void rehash(Index& index) {
  size_t num_slots = 1024;
  while (num_slots < 2 * index.text.size()) num_slots *= 2;
  for (int c = 0; c < kNumChains; c++) {
    index.heads[c].assign(num_slots, 0);
    index.before[c].clear();
  }
  for (size_t place = 1; place <= index.text.size(); place++) chain_up(index, place);
}

int agreeing(const int32_t* a, size_t num_a, const int32_t* b, size_t num_b) {
  int most = static_cast<int>(std::min({num_a, num_b, static_cast<size_t>(kLongest)})), n = 0;
  while (n < most && a[-1 - n] == b[-1 - n]) n++;
  return n;
}

// Occurrences of the end of `own` in an index, those of the longer part first, of each the latest first.
void find(const Index& own, const Index& index, std::vector<Occurrence>& found) {
  const int32_t* end = own.text.data() + own.text.size();
  for (int c = 0; c < kNumChains; c++) {
    if (own.text.size() < static_cast<size_t>(kGrams[c]) || index.heads[c].empty()) continue;
    int32_t place = index.heads[c][slot(end, kGrams[c], index.heads[c].size())];
    for (int i = 0; i <= kMostOccurrences && place > static_cast<int32_t>(index.begin); i++) {
      const int32_t* next = index.text.data() + place;
      if (next != end) {
        int length = agreeing(end, own.text.size(), next, place - index.begin);
        bool is_known = c > 0 && length >= kGrams[0];  // the chain before had it
        if (length >= kGrams[c] && !is_known) found.push_back({next, index.text.size() - place, length, &own == &index});
      }
      place = index.before[c][place - 1];
    }
  }
}

struct Wanted {
  int32_t k, most_nodes, num_tokens;
  int32_t num_children;           // of every node at most, without a static shape
  const int32_t* first_children;  // of a static shape: the first child of its context's end and of each node, and the end
  double min_probability, min_expected;
};

struct Node {
  int32_t token, parent, depth, place;  // place: which node of the shape it is, 0 the context's end
  double probability;                   // of its path
  std::vector<int> alive;               // occurrences that agree with its path
  int32_t number = -1;                  // in the draft
};

// A token that may come next: its votes, and the occurrences that it follows.
struct Choice {
  int32_t token;
  double votes;
  std::vector<int> alive;
};

// The tree of continuations, as far as its likeliest nodes were looked at.
struct Draft {
  Draft(const Wanted& wanted, const std::vector<Occurrence>& found)
      : wanted(wanted), found(found), open(Less{&nodes}) {}

  // Take the likeliest nodes, as many as are wanted, one after the other.
  template <typename Take>
  void grow(Take take) {
    nodes.push_back({0, -1, 0, 0, 1.0, {}});
    for (size_t i = 0; i < found.size(); i++) nodes[0].alive.push_back(static_cast<int>(i));
    expand(0);
    for (int num = 0; num < wanted.most_nodes && !open.empty(); num++) {
      int node = open.top();
      open.pop();
      take(nodes[node]);
      expand(node);
    }
  }

  std::vector<Node> nodes;

 private:
  // Offer a node's children.
  void expand(int at) {
    if (nodes[at].depth == wanted.k) return;
    double votes = vote(at);
    const int32_t* first = wanted.first_children;
    const int32_t place = nodes[at].place, depth = nodes[at].depth;
    const size_t most = first == nullptr ? wanted.num_children : first[place + 1] - first[place];
    for (size_t rank = 0; rank < std::min(most, choices.size()); rank++) {
      double probability = nodes[at].probability * choices[rank].votes / votes;
      if (probability < wanted.min_probability) break;
      int32_t its = first == nullptr ? 0 : first[place] + static_cast<int32_t>(rank) + 1;
      nodes.push_back({choices[rank].token, at, depth + 1, its, probability, std::move(choices[rank].alive)});
      open.push(static_cast<int>(nodes.size()) - 1);
    }
  }

  // Fill in `choices`, those with most votes first; the votes of all, the escape's included.
  double vote(int at) {
    const size_t depth = nodes[at].depth;
    path.resize(depth);
    for (int node = at; nodes[node].depth > 0; node = nodes[node].parent) path[nodes[node].depth - 1] = nodes[node].token;
    choices.clear();
    double votes = kEscape;
    for (int i : nodes[at].alive) {
      const Occurrence& one = found[i];
      if (depth >= one.num_next && !one.goes_on) continue;
      int32_t token = depth < one.num_next ? one.next[depth] : path[depth - one.num_next];
      double length = one.length + static_cast<double>(depth), its = length * length * length;
      votes += its;
      if (token < 0 || token >= wanted.num_tokens) continue;
      auto choice = std::find_if(choices.begin(), choices.end(), [&](const Choice& c) { return c.token == token; });
      if (choice == choices.end()) choice = choices.insert(choices.end(), {token, 0, {}});
      choice->votes += its;
      choice->alive.push_back(i);
    }
    std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.votes > b.votes; });
    return votes;
  }

  struct Less {
    const std::vector<Node>* nodes;
    bool operator()(int a, int b) const {
      double of_a = (*nodes)[a].probability, of_b = (*nodes)[b].probability;
      return of_a != of_b ? of_a < of_b : a > b;
    }
  };

  const Wanted& wanted;
  const std::vector<Occurrence>& found;
  std::priority_queue<int, std::vector<int>, Less> open;
  std::vector<Choice> choices;
  std::vector<int32_t> path;
};

}  // namespace

extern "C" {

Index* suffix_new() { return new Index; }

void suffix_free(Index* index) { delete index; }

int64_t suffix_bytes(const Index* index) {
  size_t numbers = index->text.capacity();
  for (int c = 0; c < kNumChains; c++) numbers += index->heads[c].capacity() + index->before[c].capacity();
  return static_cast<int64_t>(sizeof(Index) + 4 * numbers);
}

void suffix_extend(Index* index, const int32_t* tokens, int64_t num) {
  size_t place = index->text.size();
  index->text.insert(index->text.end(), tokens, tokens + num);
  if (index->text.size() > index->heads[0].size()) return rehash(*index);
  while (place < index->text.size()) chain_up(*index, ++place);
}

// Forget the first tokens that are left.
void suffix_drop(Index* index, int64_t num) {
  index->begin += num;
  if (index->begin < 1024 || 2 * index->begin < index->text.size()) return;
  index->text.erase(index->text.begin(), index->text.begin() + index->begin);
  index->text.shrink_to_fit();
  index->begin = 0;
  rehash(*index);
}

// Nodes that follow the end of `own`, as it went on there before in it and in `others` (or null), the likeliest first:
// their tokens and parents; how many. None where too few of the next tokens are expected to be right, whatever is wanted.
int64_t suffix_propose(const Index* own, const Index* others, const Wanted* wanted, int32_t* tokens, int32_t* parents) {
  std::vector<Occurrence> found;
  find(*own, *own, found);
  if (others != nullptr) find(*own, *others, found);
  if (found.empty()) return 0;
  if (wanted->min_expected > 0) {
    Wanted chain{kHorizon, kHorizon, wanted->num_tokens, 1, nullptr, wanted->min_probability, 0};
    double expected = 0;
    Draft(chain, found).grow([&](const Node& node) { expected += node.probability; });
    if (expected < wanted->min_expected) return 0;
  }
  int64_t num = 0;
  Draft draft(*wanted, found);
  draft.grow([&](Node& node) {
    tokens[num] = node.token;
    parents[num] = draft.nodes[node.parent].number;
    node.number = static_cast<int32_t>(num++);
  });
  return num;
}

}  // extern "C"
