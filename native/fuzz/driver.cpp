// Runs a fuzz target where the compiler brings no libFuzzer: inputs are made at random from those
// before, whatever code they reach. Takes the options of libFuzzer that the Makefile uses:
//
//   fuzz_frames -max_total_time=SECONDS -artifact_prefix=FOLDER/ [FOLDER]
//   fuzz_frames FILE
//
// An input that ends the process is written to FOLDER/crash-...; that file as the argument runs it
// again.
#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// A target aborts if it has something against its input.
extern "C" const char* __asan_default_options() { return "handle_abort=1"; }

namespace {

using Input = std::vector<std::uint8_t>;

constexpr std::size_t kLargest = 4 << 10;
constexpr std::size_t kKept = 4096;
constexpr unsigned kSlow = 20;  // seconds that one input may take

Input tried;
std::string artifact = "crash";

void keep_artifact() {
  const int file = open(artifact.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0 || write(file, tried.data(), tried.size()) < 0) return;
  std::fprintf(stderr, "The input is in %s\n", artifact.c_str());
}

void on_alarm(int) {
  keep_artifact();
  _exit(70);
}

void run() {
  alarm(kSlow);
  LLVMFuzzerTestOneInput(tried.data(), tried.size());
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  Input next(const std::vector<Input>& known) {
    Input input = known.empty() ? Input{} : known[below(known.size())];
    for (std::size_t changes = 1 + below(6); changes > 0; --changes) change(input, known);
    input.resize(std::min(input.size(), kLargest));
    return input;
  }
  std::size_t below(std::size_t most) { return most == 0 ? 0 : random_() % most; }

 private:
  void change(Input& input, const std::vector<Input>& known) {
    const std::size_t place = below(input.size() + 1);
    const auto at = input.begin() + static_cast<std::ptrdiff_t>(place);
    const std::size_t count = below(std::min<std::size_t>(input.size() - place, 16) + 1);
    const auto end = at + static_cast<std::ptrdiff_t>(count);
    switch (below(5)) {
      case 0:
        input.erase(at, end);
        break;
      case 1: {
        Input fresh(1 + below(24));
        for (std::uint8_t& byte : fresh) byte = byte_like();
        input.insert(at, fresh.begin(), fresh.end());
        break;
      }
      case 2:
        for (auto byte = at; byte != end; ++byte) *byte = byte_like();
        break;
      case 3: {
        const Input copy(at, end);
        input.insert(at, copy.begin(), copy.end());
        break;
      }
      case 4:
        if (known.empty()) return;
        const Input& other = known[below(known.size())];
        input.insert(at, other.begin(),
                     other.begin() + static_cast<std::ptrdiff_t>(below(other.size() + 1)));
        break;
    }
  }
  // Borders are met more often than others.
  std::uint8_t byte_like() {
    static const std::uint8_t borders[] = {0, 1, 2, 3, 0x7f, 0x80, 0xfe, 0xff};
    return static_cast<std::uint8_t>(below(2) == 0 ? borders[below(std::size(borders))] : random_());
  }

  std::mt19937_64 random_;
};

}  // namespace

int main(int count, char** arguments) {
  std::vector<Input> known;
  long seconds = 0;
  const auto read = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    known.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  };
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument.starts_with("-max_total_time=")) seconds = std::stol(value);
    if (argument.starts_with("-artifact_prefix="))
      artifact = value + "crash-" + std::to_string(getpid());
    if (argument.starts_with("-")) continue;
    if (!std::filesystem::is_directory(argument)) {
      read(argument);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argument)) read(entry.path());
  }
  std::signal(SIGALRM, on_alarm);
  __sanitizer_set_death_callback(keep_artifact);
  for (const Input& input : known) {
    tried = input;
    run();
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  Mutator mutator(std::random_device{}());
  std::uint64_t runs = known.size();
  for (; Clock::now() < end; ++runs) {
    tried = mutator.next(known);
    run();
    // Some stay, so that inputs become long.
    if (known.size() < kKept) {
      known.push_back(tried);
    } else if (mutator.below(16) == 0) {
      known[mutator.below(kKept)] = tried;
    }
  }
  std::printf("stat::number_of_executed_units: %llu\n", static_cast<unsigned long long>(runs));
}
