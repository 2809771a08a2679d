// Scores with a recpipe package in C++: libtorch runs its compiled dense part, and FBGEMM's own operators look its
// rows up. It does what score.py in the package does, with the same bits.
//
//   score PACKAGE                              scores the golden batch; ends with 1 if it is off
//   score PACKAGE BATCH.safetensors SCORES     scores a batch: dense, ids, lengths, perhaps weights; float32 to SCORES
//
// Compiled code is run: score packages that you trust, and check their files first, which this program does not:
// (cd PACKAGE && sha256sum -c manifest.sha256).

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>

#include "json.hpp"

using at::Tensor;
using Tensors = std::unordered_map<std::string, Tensor>;
using std::filesystem::path;

constexpr int kHost = 3;         // FBGEMM's place of a table in memory
constexpr int64_t kAlignment = 64;  // of tables and inputs, in bytes
constexpr int64_t kDefaultRow = 1;  // of keys without a row of their own
const std::vector<std::string> kTypes = {"fp32", "fp16", "int8", "int4", "int2"};  // as FBGEMM numbers them

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

size_t place_in(const std::vector<std::string>& all, const std::string& one) {
  auto found = std::find(all.begin(), all.end(), one);
  if (found == all.end()) fail("'" + one + "' is not known");
  return found - all.begin();
}

std::string read_text(const path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) fail(file.string() + " cannot be read");
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

// The tensors of a safetensors file, mapped into memory.
Tensors read_tensors(const path& file) {
  static const std::map<std::string, at::ScalarType> types = {
      {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}, {"F64", at::kDouble}, {"I64", at::kLong},
      {"I32", at::kInt},   {"I8", at::kChar},  {"U8", at::kByte},       {"BOOL", at::kBool}};
  auto size = static_cast<int64_t>(std::filesystem::file_size(file));
  Tensor data = at::from_file(file.string(), /*shared=*/false, size, at::kByte);
  const auto* bytes = data.const_data_ptr<uint8_t>();
  uint64_t length = 0;  // of the header, in the first 8 bytes
  for (int n = 7; n >= 0; --n) length = length << 8 | bytes[n];
  if (8 + length > static_cast<uint64_t>(size)) fail(file.string() + ": its header is cut");
  int64_t start = 8 + static_cast<int64_t>(length);
  const Json header = Json::parse({reinterpret_cast<const char*>(bytes) + 8, length});
  Tensors made;
  for (const auto& [name, about] : header.object()) {
    if (name == "__metadata__") continue;
    std::vector<int64_t> shape;
    for (const auto& own : about["shape"].list()) shape.push_back(own.whole());
    auto first = start + about["data_offsets"][0].whole(), end = start + about["data_offsets"][1].whole();
    if (end > size) fail(file.string() + ": '" + name + "' is cut");
    made[name] = data.slice(0, first, end).view(types.at(about["dtype"].text())).view(shape);
  }
  return made;
}

// Where each bag begins, and where the last one ends.
Tensor offsets_of(const Tensor& lengths) {
  return at::cat({at::zeros({1}, at::kLong), lengths.cumsum(0)});
}

// What one of FBGEMM's operators, which its library has registered, gives for these arguments.
Tensor operator_of_fbgemm(const char* name, std::vector<c10::IValue> arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&arguments);
  return arguments.at(0).toTensor();
}

// All tables in one buffer, with the byte at which each begins.
struct Tables {
  Tensor rows;
  std::map<std::string, int64_t> starts;
  Tensors places;  // of pruned tables: for each id its row among those kept, or -1

  Tables(const path& directory, const Json& about) {
    std::map<std::string, Tensor> found;
    int64_t end = 0;
    for (const auto& [name, table] : about.object()) {
      if (!table.has("file")) fail("its tables are held by shards, which recpipe serve asks");
      Tensors own = read_tensors(directory / table["file"].text());
      if (own.count("places")) places[name] = own.at("places").clone();
      found[name] = own.at("rows").reshape({-1});
      starts[name] = end;
      end = (end + found[name].numel() + kAlignment - 1) / kAlignment * kAlignment;
    }
    rows = at::empty({end}, at::kByte);
    for (const auto& [name, own] : found) rows.slice(0, starts[name], starts[name] + own.numel()).copy_(own);
  }
};

// One lookup: of some features, each in its table.
class Lookup {
 public:
  bool weighted;  // whether rows are multiplied by the weights of their ids

  Lookup(const Json& about, const Json& tables, const std::vector<std::string>& names, const Tables& held) {
    std::vector<int64_t> starts, types, ends = {0};
    std::vector<int64_t> widest(kTypes.size(), 0);
    std::vector<Tensor> places, counts = {at::zeros({1}, at::kLong)};
    for (const auto& part : about["parts"].list()) {
      const auto& name = part[1].text();
      const auto& table = tables[name];
      auto type = place_in(kTypes, table["type"].text());
      auto width = table["dimension"].whole();
      features_.push_back(static_cast<int64_t>(place_in(names, part[0].text())));
      starts.push_back(held.starts.at(name));
      types.push_back(static_cast<int64_t>(type));
      ends.push_back(ends.back() + width);
      widest[type] = std::max(widest[type], width);
      auto own = held.places.count(name) ? held.places.at(name) : at::empty({0}, at::kInt);
      places.push_back(own);
      counts.push_back(at::full({1}, own.numel(), at::kLong));
    }
    auto number = static_cast<int64_t>(features_.size());
    tables_ = {held.rows,
               at::empty({0}, at::kByte),
               at::full({number}, kHost, at::kInt),
               at::tensor(starts, at::kLong),
               at::tensor(types, at::kLong).to(at::kByte),
               at::tensor(ends, at::kLong).to(at::kInt),
               ends.back()};
    for (auto type : {4, 3, 2, 1, 0}) tables_.push_back(widest[type]);
    places_ = at::cat(places);
    place_starts_ = at::cat(counts).cumsum(0);
    mode_ = static_cast<int64_t>(place_in({"sum", "mean", "none"}, about["pooling"].text()));
    weighted = about.truth("weighted");
  }

  // Appends what the dense part takes of this lookup: pooled rows float32 [B, W]; or a row for each id, float32
  // [N, D], and how many each sample has, int64 [B].
  void append(std::vector<Tensor>& inputs, const Tensor& rows, const Tensor& lengths, int64_t samples,
              const std::optional<Tensor>& weights) const {
    Tensor offsets = offsets_of(lengths), own_lengths = of_features(lengths, samples);
    std::vector<Tensor> ids, own_weights;
    for (auto feature : features_) {
      auto first = offsets[feature * samples].item<int64_t>(), end = offsets[(feature + 1) * samples].item<int64_t>();
      ids.push_back(rows.slice(0, first, end));
      if (weighted) own_weights.push_back(weights->slice(0, first, end));
    }
    Tensor own = at::cat(ids), own_offsets = offsets_of(own_lengths);
    if (places_.numel() > 0) {
      own = operator_of_fbgemm("fbgemm::pruned_array_lookup", {own, own_offsets, places_, place_starts_});
    }
    auto arguments = tables_;
    c10::IValue none, weighs = weighted ? c10::IValue(at::cat(own_weights)) : none;
    // float32 results, no cache, rows without padding, no float8
    arguments.insert(arguments.end(), {own, own_offsets, mode_, weighs, 0, none, none, 1, 0, -1, -1});
    inputs.push_back(
        operator_of_fbgemm("fbgemm::int_nbit_split_embedding_codegen_lookup_function", std::move(arguments)));
    if (mode_ == 2) inputs.push_back(own_lengths);
  }

 private:
  std::vector<int64_t> features_;
  std::vector<c10::IValue> tables_;  // the operator's arguments before the ids
  Tensor places_, place_starts_;
  int64_t mode_;

  Tensor of_features(const Tensor& lengths, int64_t samples) const {
    std::vector<Tensor> own;
    for (auto feature : features_) own.push_back(lengths.slice(0, feature * samples, (feature + 1) * samples));
    return at::cat(own);
  }
};

// The compiled dense part for batches from some number of samples on.
class Program {
 public:
  int64_t first;
  std::string golden;  // the name of its golden scores
  double tolerance;

  Program(const path& directory, const Json& about)
      : first(about["from"].whole()),
        golden(about["golden"].text()),
        tolerance(about["tolerance"].number()),
        loader_(std::make_unique<torch::inductor::AOTIModelPackageLoader>(
            (directory / about["file"].text()).string())) {
    if (about["constants"].is_null()) return;
    Tensors all = read_tensors(directory / about["constants"].text());
    for (const auto& name : loader_->get_constant_fqns()) constants_[name] = all.at(name).clone();
    loader_->load_constants(constants_, /*use_inactive=*/false, /*check_full_update=*/false, /*user_managed=*/true);
  }

  // Scores float32 [B] or [B, T].
  Tensor operator()(const Tensor& dense, const std::vector<Tensor>& found) const {
    std::vector<Tensor> inputs = {dense.contiguous()};
    // MKL rounds differently from other addresses.
    if (reinterpret_cast<uintptr_t>(inputs[0].const_data_ptr()) % kAlignment) inputs[0] = inputs[0].clone();
    for (const auto& own : found) inputs.push_back(own.contiguous());
    return loader_->boxed_run(std::move(inputs)).at(0);
  }

 private:
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  Tensors constants_;  // the program refers to them
};

class Scorer {
 public:
  explicit Scorer(const path& directory)
      : directory_(directory), manifest_(Json::parse(read_text(directory / "manifest.json"))) {
    if (manifest_.has("effects")) fail("it has effects, which correct its logits: score.py applies them");
    require_processor();
    for (const auto& feature : manifest_["sparse"].list()) names_.push_back(feature["name"].text());
    Tables tables(directory, manifest_["tables"]);
    for (const auto& about : manifest_["lookups"].list()) {
      lookups_.emplace_back(about, manifest_["tables"], names_, tables);
    }
    if (manifest_.has("maps")) {
      for (const auto& [name, about] : manifest_["maps"].object()) {
        maps_[name] = read_tensors(directory / about["file"].text());
      }
    }
    for (const auto& about : manifest_["programs"].list()) programs_.emplace_back(directory, about);
  }

  // Scores of dense float32 [B, D], ids int64 [N] and lengths int64 [F * B], and weights float32 [N] where ids have
  // some: ids are ordered by feature and then by sample, as lengths are.
  Tensor operator()(const Tensor& dense, const Tensor& ids, const Tensor& lengths,
                    const std::optional<Tensor>& weights = std::nullopt) const {
    c10::InferenceMode guard;
    const Program* chosen = nullptr;
    for (const auto& program : programs_) {
      if (program.first <= dense.size(0)) chosen = &program;
    }
    return (*chosen)(dense, looked_up(dense, ids, lengths, weights));
  }

  // The largest difference of the golden batch's scores, by any program; throws if it is more than the package allows.
  double golden_difference() const {
    c10::InferenceMode guard;
    Tensors golden = read_tensors(directory_ / "golden.safetensors");
    std::optional<Tensor> weights;
    if (golden.count("weights")) weights = golden.at("weights");
    auto found = looked_up(golden.at("dense"), golden.at("ids"), golden.at("lengths"), weights);
    double worst = 0;
    for (const auto& program : programs_) {
      auto off = (program(golden.at("dense"), found) - golden.at(program.golden)).abs().max().item<double>();
      if (!(off <= program.tolerance)) fail("golden scores are off by " + std::to_string(off));
      worst = std::max(worst, off);
    }
    return worst;
  }

 private:
  path directory_;
  Json manifest_;
  std::vector<std::string> names_;  // of features
  std::vector<Lookup> lookups_;
  std::map<std::string, Tensors> maps_;  // of ids that got their rows as they came: keys, ascending, and rows
  std::vector<Program> programs_;

  // What the dense part is given beside the dense features; throws for ids that are not in their table, for the
  // operators do not check.
  std::vector<Tensor> looked_up(const Tensor& dense, const Tensor& ids, const Tensor& lengths,
                                const std::optional<Tensor>& weights) const {
    auto samples = dense.size(0), features = static_cast<int64_t>(names_.size());
    auto width = static_cast<int64_t>(manifest_["dense"]["names"].list().size());
    if (dense.scalar_type() != at::kFloat || dense.dim() != 2 || dense.size(1) != width) fail("dense is not [B, D]");
    if (lengths.scalar_type() != at::kLong || lengths.numel() != features * samples || ids.scalar_type() != at::kLong ||
        (lengths < 0).any().item<bool>() || lengths.sum().item<int64_t>() != ids.numel()) {
      fail("lengths int64 [F * B] do not add up to the ids int64 [N]");
    }
    Tensor offsets = offsets_of(lengths);
    std::vector<Tensor> rows;
    for (int64_t feature = 0; feature < features; ++feature) {
      const auto& about = manifest_["sparse"][feature];
      auto first = offsets[feature * samples].item<int64_t>(), end = offsets[(feature + 1) * samples].item<int64_t>();
      Tensor own = ids.slice(0, first, end);
      if (about.has("map")) {
        const auto& map = maps_.at(about["map"].text());
        Tensor place = at::searchsorted(map.at("keys"), own).clamp_max(map.at("keys").numel() - 1);
        Tensor row = map.at("rows").index_select(0, place).to(at::kLong);
        own = at::where(map.at("keys").index_select(0, place) == own, row, kDefaultRow);
      }
      if (((own < 0) | (own >= about["rows"].whole())).any().item<bool>()) {
        fail("an id of '" + names_[feature] + "' is not in its table");
      }
      rows.push_back(own);
    }
    require_numbers(lengths.view({features, samples}));
    Tensor all = at::cat(rows);
    std::vector<Tensor> found;
    for (const auto& lookup : lookups_) {
      if (lookup.weighted && (!weights || weights->sizes() != ids.sizes())) fail("the ids have weights: give them");
      lookup.append(found, all, lengths, samples, weights);
    }
    return found;
  }

  // Throws unless features have the numbers of ids, [F, B], that rows need which are not pooled.
  void require_numbers(const Tensor& lengths) const {
    if (!manifest_.has("sequences")) return;
    for (const auto& own : manifest_["sequences"]["single"].list()) {
      if ((lengths[place_in(names_, own.text())] != 1).any().item<bool>()) fail(own.text() + " is not one id a sample");
    }
    for (const auto& group : manifest_["sequences"]["aligned"].list()) {
      for (const auto& own : group.list()) {
        if (!lengths[place_in(names_, own.text())].equal(lengths[place_in(names_, group[0].text())])) {
          fail(own.text() + " has not as many ids as " + group[0].text());
        }
      }
    }
  }

  // Throws if this processor lacks instructions that the compiled code uses, which would end the process.
  void require_processor() const {
    std::string info = read_text("/proc/cpuinfo"), flags;
    if (auto place = info.find("\nflags"); place != std::string::npos) {
      flags = info.substr(place + 1, info.find('\n', place + 1) - place - 1) + " ";
    }
    for (const auto& flag : manifest_["compiled"]["cpu_flags"].list()) {
      if (flags.find(" " + flag.text() + " ") == std::string::npos) {
        fail("this processor has no " + flag.text() + ": compile the package here with 'recpipe package PACKAGE NEW'");
      }
    }
  }
};

int main(int count, char** words) {
  if (count != 2 && count != 4) {
    std::cerr << "score PACKAGE [BATCH.safetensors SCORES]\n";
    return 2;
  }
  at::set_num_threads(1);  // several may add up in another order
  try {
    Scorer scorer{path(words[1])};
    double off = scorer.golden_difference();
    std::cout << words[1] << ": golden scores differ by " << off << "\n";
    if (count == 4) {
      Tensors batch = read_tensors(words[2]);
      std::optional<Tensor> weights;
      if (batch.count("weights")) weights = batch.at("weights");
      Tensor scores = scorer(batch.at("dense"), batch.at("ids"), batch.at("lengths"), weights).contiguous();
      std::ofstream(words[3], std::ios::binary)
          .write(static_cast<const char*>(scores.const_data_ptr()), static_cast<std::streamsize>(scores.nbytes()));
    }
    return 0;
  } catch (const std::exception& fault) {
    std::string why = fault.what();
    std::cerr << words[1] << ": " << why.substr(0, why.find('\n')) << "\n";
    return 1;
  }
}
